"""Planning transfers: what moves between two layouts. No torch.

```
kinds       tensors that lie alike, planned once
line        everything that travels, laid end to end and cut among the senders
balance     how much each sender sends
own         one rank's part, as boxes
transfer    the value
```
"""

"""Planning transfers: what moves between two layouts. No torch.

```
classes       tensors with the same shape and shardings, planned once
flows         everything that travels, laid end to end and cut among the senders
balance       how much each sender sends
local         one rank's part, as boxes
tensors_file  shardings of both sides as JSON or YAML
transfer      the value
```
"""

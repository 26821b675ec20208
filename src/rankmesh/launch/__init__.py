"""Launch: what started this process, and how it joins the others.

```
job    rank, size and meeting place, as the launcher tells them
```
"""

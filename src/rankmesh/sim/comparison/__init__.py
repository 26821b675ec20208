"""Comparison of layouts: the same program on one process and under every layout, and what makes them differ.

```
layouts      plans with the same kinds of group, and the one process they are compared with
seen         sim.see: the values that must be the same, of modules too; shards and random numbers
noise        how far values move when sums are taken in another order
session      one run: values kept or compared, collectives recorded or repaired
runner       runs of the program
stacks       which lines led to a collective
aligned      whether the results of a line equal the reference
repairs      changes that may make a run right
blame        which collective made a value differ, and which repair works
result       what compare returns
```
"""

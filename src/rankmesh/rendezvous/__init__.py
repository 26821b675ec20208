"""Agreement between ranks: one primitive, the round, over torch's stores.

```
round      participants arrive with proposals, one of them coordinates, all get one outcome
step       what they arrive with in one step of it, what they get, and how long they wait
arrivals   what the coordinator finds out before it concludes
stores     its keys in a store: TCP, File, Hash, Prefix, the store of simulated ranks
gather     all give data, one concludes, all get the conclusion
waiting    calls that may never return, and waits for keys, no longer than a limit
```
"""

from rankmesh.rendezvous.arrivals import Arrivals, lost
from rankmesh.rendezvous.channel import ChannelLost
from rankmesh.rendezvous.gather import by_rank, gather, gather_results, gather_work
from rankmesh.rendezvous.round import Round
from rankmesh.rendezvous.step import Codec, Outcome, Proposal, UntilEnough, WaitPolicy, WhileProgress
from rankmesh.rendezvous.stores import BoundedChannel, StoreChannel

__all__ = [
    "Arrivals",
    "BoundedChannel",
    "ChannelLost",
    "Codec",
    "Outcome",
    "Proposal",
    "Round",
    "StoreChannel",
    "UntilEnough",
    "WaitPolicy",
    "WhileProgress",
    "by_rank",
    "gather",
    "gather_results",
    "gather_work",
    "lost",
]

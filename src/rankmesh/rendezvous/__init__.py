"""How ranks agree: one primitive, the round, over torch stores, a folder, or both.

```
round      participants arrive with proposals, one of them coordinates, all get one outcome
step       what they arrive with in one step of it, what they get, and how long they wait
arrivals   what the coordinator finds out before it concludes
channel    what a round needs of a transport
stores     torch's stores: TCP, File, Hash, Prefix, the store of simulated ranks
folder     a folder that the ranks share
fallback   several of them as one: what is written goes to all, the first that answers counts
```
"""

from rankmesh.rendezvous.arrivals import Arrivals, lost
from rankmesh.rendezvous.channel import Channel, ChannelLost
from rankmesh.rendezvous.fallback import BoundedChannel, FallbackChannel
from rankmesh.rendezvous.gather import gather, gather_results
from rankmesh.rendezvous.round import Round
from rankmesh.rendezvous.step import Codec, Outcome, Proposal, UntilEnough, WaitPolicy, WhileProgress
from rankmesh.rendezvous.stores import StoreChannel

__all__ = [
    "Arrivals",
    "BoundedChannel",
    "Channel",
    "ChannelLost",
    "Codec",
    "FallbackChannel",
    "Outcome",
    "Proposal",
    "Round",
    "StoreChannel",
    "UntilEnough",
    "WaitPolicy",
    "WhileProgress",
    "gather",
    "gather_results",
    "lost",
]

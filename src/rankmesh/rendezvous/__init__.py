"""How ranks agree: one primitive, the round, over torch stores or a folder.

```
round      participants arrive with proposals, one of them coordinates, all hear one outcome
outcome    what they hear
channel    what a round needs of a transport
stores     torch's stores: TCP, File, Hash, Prefix, the store of simulated ranks
folder     a folder that the ranks share
```
"""

from rankmesh.rendezvous.channel import Channel, ChannelLost
from rankmesh.rendezvous.gather import gather
from rankmesh.rendezvous.outcome import Outcome
from rankmesh.rendezvous.round import Arrivals, Patience, Proposal, Round, StoreLost, lost
from rankmesh.rendezvous.stores import StoreChannel

__all__ = [
    "Arrivals",
    "Channel",
    "ChannelLost",
    "Outcome",
    "Patience",
    "Proposal",
    "Round",
    "StoreChannel",
    "StoreLost",
    "gather",
    "lost",
]

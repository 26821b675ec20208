from contextlib import redirect_stdout
from io import StringIO

import fairscale.nn.model_parallel.initialize as peer
from hypothesis import given
from hypothesis import strategies as st
from tests.dialects import dry

import rankmesh.dialects.fairscale as ours

SIZES = st.integers(1, 4)
GROUPS = [f"get_{kind}_parallel_group" for kind in ("model", "pipeline", "data")]
NUMBERS = [f"get_{kind}_parallel_{what}" for kind in ("model", "data") for what in ("world_size", "rank")]
NUMBERS += ["get_model_parallel_src_rank", "get_pipeline_parallel_ranks"]


def _answers(module, mp, pp):
    """Everything that the module says of this rank."""
    with redirect_stdout(StringIO()):
        module.initialize_model_parallel(mp, pp)
    output = {name: dry.members(getattr(module, name)()) for name in GROUPS}
    output |= {name: getattr(module, name)() for name in NUMBERS}
    output["initialized"] = module.model_parallel_is_initialized()
    module.destroy_model_parallel()
    output["destroyed"] = module.model_parallel_is_initialized()
    return output


@dry.PROPERTIES
@given(SIZES, SIZES, SIZES, st.data())
def test_fairscale_says_the_same(mp, pp, dp, data):
    """Dry worlds of up to 64 ranks: fairscale 0.4.13 and the drop-in give the same groups, ranks and sizes."""
    world = mp * pp * dp
    with dry.world(data.draw(st.integers(0, world - 1)), world):
        assert _answers(ours, mp, pp) == _answers(peer, mp, pp)

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


def _same(me):
    @dry.PROPERTIES
    @given(st.tuples(SIZES, SIZES, SIZES), st.data())
    def check(sizes, data):
        mp, pp, dp = sizes
        world = mp * pp * dp
        with dry.world(data.draw(st.integers(0, world - 1)), world):
            assert _answers(ours, mp, pp) == _answers(peer, mp, pp)

    check()


def test_fairscale_says_the_same(ranks):
    """Dry worlds of up to 64 ranks: fairscale 0.4.13 and the drop-in give the same groups, ranks and sizes."""
    ranks(1, _same, world=None)


def _both_refuse(me):
    for module in (peer, ours):
        for sizes in ((3, 1), (2, 3), (4, 2)):
            me.error(AssertionError, module.initialize_model_parallel, *sizes)
        module.initialize_model_parallel(2)
        me.error(AssertionError, module.initialize_model_parallel, 2)
        module.destroy_model_parallel()
        for name in GROUPS + NUMBERS:
            me.error(AssertionError, getattr(module, name))


def test_what_fairscale_refuses_is_refused(ranks):
    """4 ranks: sizes that do not divide, a second initialisation, and every getter after the end assert in both."""
    ranks(4, _both_refuse)

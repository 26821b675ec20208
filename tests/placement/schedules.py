"""Pipeline schedules run event by event: 1F1B, and interleaved 1F1B as Megatron-LM orders it."""


def order(stage, pp, microbatches, v):
    """The passes of a stage in order: (forward, microbatch, part). Microbatches come in rounds of pp."""
    if v == 1:
        warm = min(microbatches, pp - stage - 1)
        forward = [("F", number, 0) for number in range(microbatches)]
        backward = [("B", number, 0) for number in range(microbatches)]
    else:
        warm = min(microbatches * v, 2 * (pp - stage - 1) + (v - 1) * pp)
        forward, backward = [], []
        for number in range(microbatches * v):
            turn, place = divmod(number, pp * v)
            part, within = divmod(place, pp)
            forward.append(("F", turn * pp + within, part))
            backward.append(("B", turn * pp + within, v - 1 - part))
    passes = forward[:warm]
    for ahead, behind in zip(forward[warm:], backward, strict=False):
        passes += [ahead, behind]
    return passes + backward[len(forward) - warm :]


def most_in_flight(stage, pp, microbatches, v):
    """The most microbatches whose activations a stage keeps, in units of all of its layers."""
    kept = most = 0
    for kind, _, _ in order(stage, pp, microbatches, v):
        kept += 1 if kind == "F" else -1
        most = max(most, kept)
    return most / v


def makespan(seconds, microbatches, v):
    """Seconds of a step: ``seconds[stage]`` of a microbatch, a third forward, two thirds backward, cut into v parts."""
    pp = len(seconds)
    left = [order(stage, pp, microbatches, v) for stage in range(pp)]
    free, done = [0.0] * pp, {}
    while any(left):
        for stage, passes in enumerate(left):
            while passes:
                kind, number, part = passes[0]
                step = part * pp + stage
                if kind == "F":
                    before = ("F", number, step - 1) if step else None
                else:
                    before = ("B", number, step + 1) if step + 1 < pp * v else ("F", number, step)
                if before is not None and before not in done:
                    break
                share = (1 if kind == "F" else 2) / 3 / v
                start = max(free[stage], done.get(before, 0.0))
                free[stage] = done[kind, number, step] = start + seconds[stage] * share
                passes.pop(0)
    return max(free)

/** Sizes that a recipe derives: the data-parallel size from the world, and what must divide what. */
import { axisSize, integer, times } from "../axes";
import { planError } from "../messages";

/** `total / parts`, which must be whole. */
export function divided(total: number, parts: number, what: string, rule: string): number {
  if (total % parts) throw planError(`${rule} = ${parts} does not divide ${what} = ${total}; change one of them`);
  return total / parts;
}

/** The world size and the data-parallel size: either may be left open, and both must fit when both are given. */
export function worldAndDp(
  worldSize: number | undefined,
  dp: number | undefined,
  model: Record<string, number>,
): [number, number] {
  const block = Object.entries(model).reduce((total, [name, size]) => total * axisSize(name, size), 1);
  const shown = times(new Map(Object.entries(model)));
  if (worldSize === undefined) {
    if (dp === undefined)
      throw planError("neither world_size nor dp is given; give one of them, as the other follows from it");
    return [block * axisSize("dp", dp), dp];
  }
  const total = integer(worldSize, "world_size", 1);
  if (total % block)
    throw planError(
      `world_size is ${total}, but ${shown} = ${block} does not divide it; use a multiple of ${block} ranks, or ` +
        "change a size",
    );
  if (dp !== undefined && axisSize("dp", dp) * block !== total)
    throw planError(
      `world_size is ${total}, but dp ${dp} x ${shown} = ${dp * block}; leave dp out, or use dp=${total / block}`,
    );
  return [total, total / block];
}

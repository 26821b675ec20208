/** Sizes that a recipe derives: the data-parallel size from the world, and what must divide what. */
import { axisSize, integer, times } from "../axes";
import { planError } from "../words";

/** `total / parts`, which must be whole. */
export function divided(total: number, parts: number, what: string, rule: string): number {
  if (total % parts)
    throw planError(`received ${rule} = ${parts} for ${what} = ${total}; it must divide it; change one of them`);
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
      throw planError("received neither world_size nor dp; one follows from the other; give one of them");
    return [block * axisSize("dp", dp), dp];
  }
  const total = integer(worldSize, "world_size", 1);
  if (total % block)
    throw planError(
      `received world_size ${total} and ${shown} = ${block}; the product must divide the world size; change a size`,
    );
  if (dp !== undefined && axisSize("dp", dp) * block !== total)
    throw planError(
      `received world_size ${total}, dp ${dp} and ${shown} = ${block}; dp x ${block} must be the world size; ` +
        `leave dp out, or use dp=${total / block}`,
    );
  return [total, total / block];
}

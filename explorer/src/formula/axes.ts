/**
 * Axis names, sizes and axis strings: what a user may write, and an error for each mistake.
 *
 *     "tp=2,cp=2,dp=*,pp=2"      name=size, the first axis adjacent; one size may be *
 *     "dp-cp"                    a set of axes, joined by hyphens
 */
import { layoutError, quoted, repr, unknownAxis, type Plain } from "./messages";

/** Sizes by name, in the order of the axes; `null` is a `*`. */
export type Sizes = ReadonlyMap<string, number>;
export type OpenSizes = ReadonlyMap<string, number | null>;

const RESERVED = ["offset", "rank_map", "shared", "view"];
const IDENTIFIER = /^[\p{XID_Start}_][\p{XID_Continue}]*$/u;

export const isIdentifier = (name: string): boolean => IDENTIFIER.test(name);
export const product = (sizes: Iterable<number>): number => [...sizes].reduce((total, size) => total * size, 1);

/** A whole number of at least `least`. */
export function integer(value: Plain, what: string, least: number): number {
  if (typeof value === "number" && Number.isInteger(value) && value >= least) return value;
  throw layoutError(`${what} is ${quoted(value)}; give an integer of at least ${least}`);
}

export function axisName(name: string): string {
  if (!isIdentifier(name))
    throw layoutError(
      `${quoted(name)} cannot name an axis; use letters, digits and underscores, such as tp or dp_shard`,
    );
  if (RESERVED.includes(name))
    throw layoutError(
      `${repr(name)} cannot name an axis: ${RESERVED.join(", ")} are arguments of the mesh; rename the axis`,
    );
  return name;
}

export function axisSize(name: string, size: Plain): number {
  if (size === -1)
    throw layoutError(
      `size of axis ${repr(name)} is -1; write ${name}=* in a SPEC to infer it, or an integer of at least 1`,
    );
  return integer(size, `size of axis ${repr(name)}`, 1);
}

/** The names in `dp-cp`, each once. */
export function axisNames(axes: string | readonly string[]): string[] {
  const names = typeof axes === "string" ? axes.split("-") : [...axes];
  if (names.some((name) => !name))
    throw layoutError(`axes are ${quoted(axes)}; write names joined by hyphens, such as 'dp-cp'`);
  const twice = names.find((name, place) => names.indexOf(name) !== place);
  if (twice !== undefined) throw layoutError(`axes ${quoted(names.join("-"))} name ${repr(twice)} twice; name it once`);
  return names;
}

/** A whole number as Python's `int` reads it; undefined where it does not. */
export function int(text: string): number | undefined {
  const digits = text.trim();
  return /^[+-]?\d+(_\d+)*$/.test(digits) ? Number(digits.replaceAll("_", "")) : undefined;
}

/** The sizes in an axis string, `null` where the text says `*`. */
export function parseAxes(text: string): Map<string, number | null> {
  const sizes = new Map<string, number | null>();
  for (const item of text.split(",")) {
    const [name, equals, size] = partition(item, "=");
    if (!equals || !size)
      throw layoutError(`${quoted(item.trim())} in ${quoted(text)} is not an axis; write name=size, such as tp=2`);
    if (sizes.has(axisName(name))) throw layoutError(`${quoted(text)} names axis ${repr(name)} twice; name it once`);
    sizes.set(name, size === "*" ? null : axisSize(name, number(size, text)));
  }
  return sizes;
}

function number(size: string, text: string): number {
  const value = int(size);
  if (value !== undefined) return value;
  throw layoutError(`size ${quoted(size)} in ${quoted(text)} is not a whole number; write one, or * to infer it`);
}

/** What stands before and after the first separator, without spaces around. */
export function partition(text: string, separator: string): [string, boolean, string] {
  const place = text.indexOf(separator);
  if (place < 0) return [text.trim(), false, ""];
  return [text.slice(0, place).trim(), true, text.slice(place + separator.length).trim()];
}

/** Infer the one `*` from `total`; without one, check that the product is `total`. */
export function fill(sizes: OpenSizes, total: number | null, what: string): Map<string, number> {
  const known = product([...sizes.values()].filter((size) => size !== null));
  const open = [...sizes.keys()].filter((name) => sizes.get(name) === null);
  if (open.length > 1)
    throw layoutError(`* stands for ${open.join(" and ")}; only one size can be inferred; give the others`);
  if (total === null) {
    if (open.length)
      throw layoutError(
        `${open[0]}=* cannot be inferred without ${what}; give ${what} (--world-size) or write the size`,
      );
    return new Map([...sizes].map(([name, size]) => [name, size!]));
  }
  if (open.length && total % known)
    throw layoutError(
      `${what} is ${total}, which ${productOf(sizes)} does not divide, so ${open[0]}=* has no size; ` + "change a size",
    );
  if (!open.length && known !== total) {
    const start = what === "world_size" ? `start ${known} ranks, or ` : "";
    throw layoutError(`${what} is ${total}, but ${productOf(sizes)}; ${start}${fitting(sizes, total)}`);
  }
  return new Map([...sizes].map(([name, size]) => [name, size ?? total / known]));
}

/** Sizes in words: `tp 2 x pp 4`. */
export const times = (sizes: OpenSizes): string => [...sizes].map(([name, size]) => `${name} ${size}`).join(" x ");

/** The sizes that are given, and their product: `tp 2 x dp 4 = 8`, or `tp=2`. */
function productOf(sizes: OpenSizes): string {
  const given = [...sizes].filter(([, size]) => size !== null);
  if (given.length === 1) return `${given[0][0]}=${given[0][1]}`;
  return `${times(new Map(given)) || "1"} = ${product(given.map(([, size]) => size!))}`;
}

/** One size that may be changed alone to fit the total; the last axis first, as it is usually the slowest. */
function fitting(sizes: OpenSizes, total: number): string {
  const known = product([...sizes.values()].filter((size) => size !== null));
  for (const [name, size] of [...sizes].reverse()) {
    const rest = known / (size ?? 1);
    if (total % rest === 0) return `set ${name}=${total / rest}, or write ${name}=* to infer it`;
  }
  const name = [...sizes.keys()].at(-1)!;
  const rest = product([...sizes].filter(([other, size]) => other !== name && size !== null).map(([, size]) => size!));
  return `write ${name}=* and choose a multiple of ${rest}`;
}

/** `name` if it is known, else an error with the nearest name. */
export function find(name: string, known: readonly string[], what = "axis"): string {
  if (!known.includes(name)) throw unknownAxis(name, known, what);
  return name;
}

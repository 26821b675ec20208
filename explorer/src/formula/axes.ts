/**
 * Axis names, sizes and axis strings: what a user may write, and what each mistake is told.
 *
 *     "tp=2,cp=2,dp=*,pp=2"      name=size, the first axis adjacent; one size may be *
 *     "dp-cp"                    a set of axes, joined by hyphens
 */
import { layoutError, repr, unknownAxis, type Plain } from "./words";

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
  throw layoutError(`received ${repr(value)} as ${what}; it must be an integer of at least ${least}`);
}

export function axisName(name: string): string {
  if (!isIdentifier(name))
    throw layoutError(
      `received axis name ${repr(name)}; a name is letters, digits and underscores (tp, dp_shard); rename the axis`,
    );
  if (RESERVED.includes(name))
    throw layoutError(
      `received axis name ${repr(name)}; ${RESERVED.join(", ")} are arguments of the mesh; rename the axis`,
    );
  return name;
}

export const axisSize = (name: string, size: Plain): number => integer(size, `size of axis ${repr(name)}`, 1);

/** The names in `dp-cp`, each once. */
export function axisNames(axes: string | readonly string[]): string[] {
  const names = typeof axes === "string" ? axes.split("-") : [...axes];
  if (names.some((name) => !name))
    throw layoutError(`received axes ${repr(axes)}; axes are names joined by hyphens, such as 'dp-cp'`);
  const twice = names.find((name, place) => names.indexOf(name) !== place);
  if (twice !== undefined)
    throw layoutError(
      `received axes ${repr(names.join("-"))}; ${repr(twice)} is named twice and each axis counts once; name it once`,
    );
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
      throw layoutError(
        `received ${repr(item.trim())} in ${repr(text)}; each axis is written name=size, such as 'tp=2,dp=4'`,
      );
    if (sizes.has(axisName(name)))
      throw layoutError(`received axis ${repr(name)} twice in ${repr(text)}; each axis counts once; name it once`);
    sizes.set(name, size === "*" ? null : axisSize(name, number(size, text)));
  }
  return sizes;
}

function number(size: string, text: string): number {
  const value = int(size);
  if (value !== undefined) return value;
  throw layoutError(`received size ${repr(size)} in ${repr(text)}; a size is a whole number, or * for what is left`);
}

/** What stands before and after the first separator, without spaces around. */
export function partition(text: string, separator: string): [string, boolean, string] {
  const place = text.indexOf(separator);
  if (place < 0) return [text.trim(), false, ""];
  return [text.slice(0, place).trim(), true, text.slice(place + separator.length).trim()];
}

/** Replace the one `*` by what is left of `total`; without one, check that the product is `total`. */
export function fill(sizes: OpenSizes, total: number | null, what: string): Map<string, number> {
  const known = product([...sizes.values()].filter((size) => size !== null));
  const open = [...sizes.keys()].filter((name) => sizes.get(name) === null);
  if (open.length > 1)
    throw layoutError(`received * for ${open.join(" and ")}; one size at most may be *; give the others`);
  if (total === null) {
    if (open.length)
      throw layoutError(
        `received * for ${open[0]}, without ${what}; what is left needs a total; give ${what} or the size`,
      );
    return new Map([...sizes].map(([name, size]) => [name, size!]));
  }
  if (open.length && total % known)
    throw layoutError(
      `received ${what} ${total} and sizes whose product is ${known}; the product must divide it so that ` +
        `${open[0]} can be what is left; change a size`,
    );
  if (!open.length && known !== total)
    throw layoutError(
      `received ${what} ${total} and sizes whose product is ${known} (${times(sizes)}); they must be equal; ` +
        "write * for the size that should be what is left",
    );
  return new Map([...sizes].map(([name, size]) => [name, size ?? total / known]));
}

/** Sizes in words: `tp 2 x pp 4`. */
export const times = (sizes: OpenSizes): string => [...sizes].map(([name, size]) => `${name} ${size}`).join(" x ");

/** `name` if it is known, else an error with the nearest name. */
export function find(name: string, known: readonly string[], what = "axis"): string {
  if (!known.includes(name)) throw unknownAxis(name, known, what);
  return name;
}

/**
 * Python's words: how it writes values, which names it finds near, and errors whose sentences are Python's own.
 *
 *     repr("tp") == "'tp'"      repr([1, 2]) == "[1, 2]"      nearest("dpp", ["tp", "dp"], 0.6) == "dp"
 */

/** A mistake of the user: problem, values, fix. `kind` is the name of Python's error. */
export class RankmeshError extends Error {
  constructor(
    readonly kind: string,
    message: string,
  ) {
    super(message);
  }
}

export const layoutError = (message: string): RankmeshError => new RankmeshError("LayoutError", message);
export const planError = (message: string): RankmeshError => new RankmeshError("PlanError", message);
export const clusterError = (message: string): RankmeshError => new RankmeshError("ClusterError", message);

/** What a message may quote. */
export type Plain = string | number | boolean | null | undefined | readonly Plain[];

/** A value as Python's `repr` writes it: strings in quotes, tuples of numbers as lists unless said otherwise. */
export function repr(value: Plain): string {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return literal(value);
  if (typeof value === "object") return `[${value.map(repr).join(", ")}]`;
  return String(value);
}

function literal(text: string): string {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const body = Array.from(text, (letter) => escaped(letter, quote)).join("");
  return quote + body + quote;
}

function escaped(letter: string, quote: string): string {
  const named: Record<string, string> = {
    "\\": "\\\\",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
  };
  if (letter === quote) return `\\${letter}`;
  if (named[letter]) return named[letter];
  const code = letter.codePointAt(0)!;
  if (code < 32 || code === 127 || (code > 127 && code < 161) || code === 173)
    return `\\x${code.toString(16).padStart(2, "0")}`;
  return letter;
}

/** A tuple of numbers: `(2,)`, `(2, 4)`. */
export const tuple = (numbers: readonly number[]): string =>
  `(${numbers.join(", ")}${numbers.length === 1 ? "," : ""})`;

/** A float as Python writes it. */
export const float = (value: number): string => (Number.isInteger(value) ? `${value}.0` : String(value));

/** The members of a group for a message, the first of many. */
export function listed(ranks: readonly number[]): string {
  const more = ranks.length > 16 ? ` and ${ranks.length - 16} more` : "";
  return `[${ranks.slice(0, 16).join(", ")}]${more}`;
}

const AXES = "axes are joined by hyphens: '{0}'";
const KINDS = "a kind along several axes has a spec of its own, such as GroupSpec('{1}', axes='{0}')";
const PLURALS: Record<string, string> = { axis: "axes", mesh: "meshes" };

/** An axis or view that the mesh does not have. */
export function unknownAxis(name: string, known: readonly string[], what = "axis"): RankmeshError {
  const plural = PLURALS[what] ?? `${what}s`;
  const rule = known.length ? `this mesh has the ${plural} ${known.join(", ")}` : `this mesh has no ${plural}`;
  const near = suggestion(name, known, what === "axis" ? AXES : "");
  return new RankmeshError("UnknownAxis", `unknown ${what} ${quoted(name)}: ${rule}${near}`);
}

/** A value as a message quotes it: at most 80 characters of its repr. */
export function quoted(value: Plain): string {
  return shortened(repr(value));
}

/** At most 80 characters of a repr. */
export function shortened(text: string): string {
  return text.length <= 80 ? text : `${text.slice(0, 76)}...${text.at(-1)}`;
}

/** A kind of group that the plan does not have. */
export function unknownGroup(name: string, known: readonly string[]): RankmeshError {
  const rule = known.length ? `this plan has the groups ${known.join(", ")}` : "this plan has no groups";
  return new RankmeshError("UnknownGroup", `unknown group ${quoted(name)}: ${rule}${suggestion(name, known, KINDS)}`);
}

function suggestion(name: string, known: readonly string[], joined: string): string {
  const plains = new Map(known.map((other) => [plain(other), other]));
  let near = plains.get(plain(name)) ?? nearest(name, known, 0.75);
  if (near === undefined && joined) {
    const found = parts(plain(name), plains);
    if (found.length) return `; ${joined.replace("{0}", found.join("-")).replace("{1}", found.join("_"))}`;
  }
  near ??= nearest(name, known, 0.6);
  return near === undefined ? "" : `; did you mean ${repr(near)}?`;
}

const plain = (name: string): string => name.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "");

/** The known names that a text is made of, in order; none if something is left over. */
function parts(text: string, plains: ReadonlyMap<string, string>): string[] {
  const longestFirst = [...plains.keys()].sort((a, b) => b.length - a.length);
  for (const name of longestFirst) {
    if (!name || !text.startsWith(name)) continue;
    const rest = text.slice(name.length);
    if (!rest) return [plains.get(name)!];
    const further = parts(rest, plains);
    if (further.length) return [plains.get(name)!, ...further];
  }
  return [];
}

/** What `difflib.get_close_matches(name, known, n=1, cutoff)` finds: the likest, the last in order of equals. */
export function nearest(name: string, known: readonly string[], cutoff: number): string | undefined {
  let best: string | undefined;
  let most = cutoff;
  for (const other of known) {
    const score = likeness(other, name);
    if (score > most || (score === most && (best === undefined || other > best))) [best, most] = [other, score];
  }
  return best;
}

/** `difflib.SequenceMatcher(None, a, b).ratio()`. */
function likeness(a: string, b: string): number {
  const total = a.length + b.length;
  return total ? (2 * matches(a, b)) / total : 1;
}

function matches(a: string, b: string): number {
  const [i, j, size] = longest(a, b);
  if (!size) return 0;
  return size + matches(a.slice(0, i), b.slice(0, j)) + matches(a.slice(i + size), b.slice(j + size));
}

/** The longest common block, the earliest in `a`, then in `b`, among equals. */
function longest(a: string, b: string): [number, number, number] {
  let best: [number, number, number] = [0, 0, 0];
  let before = new Map<number, number>();
  for (let i = 0; i < a.length; i++) {
    const lengths = new Map<number, number>();
    for (let j = 0; j < b.length; j++) {
      if (a[i] !== b[j]) continue;
      const size = (before.get(j - 1) ?? 0) + 1;
      lengths.set(j, size);
      if (size > best[2]) best = [i - size + 1, j - size + 1, size];
    }
    before = lengths;
  }
  return best;
}

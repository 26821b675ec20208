/**
 * What the page shows, as the fragment of its address: a link is a layout.
 *
 *     #spec=tp=2,dp=4&cluster=8&kind=dp&pins=3,5
 */

export type Arrangement = "places" | "mesh";
export type Tab = "drawing" | "table";
export type Theme = "auto" | "light" | "dark";
export type Overlay = "none" | "measured" | "hang" | "slow";

export interface State {
  readonly spec: string;
  /** The world size that fills a `*`; null where the layout says its own. */
  readonly world: number | null;
  /** Empty: no hosts; a number: devices a host; an axis string of the machine; `given`: the one that came with the page. */
  readonly cluster: string;
  readonly kind: string;
  readonly arrange: Arrangement;
  readonly tab: Tab;
  readonly pins: readonly number[];
  readonly rank: number | null;
  readonly compare: string;
  readonly overlay: Overlay;
  readonly theme: Theme;
  /** The drawing alone, as other pages embed it. */
  readonly embed: boolean;
}

export const START: State = {
  spec: "megatron:world=32,tp=2,cp=2,pp=2,ep=8,etp=1",
  world: null,
  cluster: "8",
  kind: "",
  arrange: "places",
  tab: "drawing",
  pins: [],
  rank: null,
  compare: "",
  overlay: "none",
  theme: "auto",
  embed: false,
};

/** The fragment of a state: what differs from the state that the page starts with. */
export function fragmentOf(state: State, start: State = START): string {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    const text = textOf(value as Value);
    if (text !== textOf(start[name as keyof State])) parts.set(name, text);
  }
  return parts.toString().replaceAll("%3D", "=").replaceAll("%2C", ",").replaceAll("%3A", ":").replaceAll("%2F", "/");
}

type Value = State[keyof State];
const textOf = (value: Value): string => (value === null ? "" : String(value));

/** The state of a fragment; what it does not say, or says in no known way, is that of the start. */
export function stateOf(fragment: string, start: State = START): State {
  const parts = new URLSearchParams(fragment.replace(/^#/, ""));
  const text = (name: keyof State): string => parts.get(name) ?? textOf(start[name]);
  const selection = <T extends string>(name: keyof State, known: readonly T[]): T =>
    known.find((token) => token === text(name)) ?? (start[name] as T);
  return {
    spec: text("spec"),
    world: ranks(text("world"))[0] ?? null,
    cluster: text("cluster"),
    kind: text("kind"),
    arrange: selection("arrange", ["places", "mesh"]),
    tab: selection("tab", ["drawing", "table"]),
    pins: ranks(text("pins")).slice(0, 2),
    rank: ranks(text("rank"))[0] ?? null,
    compare: text("compare"),
    overlay: selection("overlay", ["none", "measured", "hang", "slow"]),
    theme: selection("theme", ["auto", "light", "dark"]),
    embed: text("embed") === "true" || text("embed") === "1",
  };
}

const ranks = (text: string): number[] =>
  text
    .split(",")
    .filter((token) => /^\d+$/.test(token))
    .map(Number);

/** Colours: one for each group of the chosen kind, one for each kind, and the paper; for light and for dark. */
import { hcl } from "d3-color";

export interface Colours {
  readonly paper: string;
  readonly place: readonly string[];
  readonly line: string;
  readonly lineHeavy: string;
  readonly ink: string;
  readonly soft: string;
  readonly cell: string;
  /** The text on a colour of a kind. */
  readonly onKind: string;
  readonly kinds: readonly string[];
  readonly groups: readonly string[];
  readonly focus: string;
  readonly onFocus: string;
  readonly cause: string;
  readonly waits: string;
  /** By the share of a step that others wait: ever further in lightness from the paper. */
  readonly heat: readonly string[];
  /** From slow to fast. */
  readonly scale: (part: number) => string;
}

const STEP = 137.508;
const HUES = 24;
// Neighbouring groups are far apart in hue; lightness changes after every twelve.
const wheel = (chroma: number, light: number, other: number): string[] =>
  Array.from({ length: HUES }, (_, number) =>
    hcl((250 + number * STEP) % 360, chroma, number < 12 ? light : other).formatHex(),
  );

export const LIGHT: Colours = {
  paper: "#ffffff",
  place: ["#f6f7f9", "#eef1f5", "#e6eaf0", "#dee3eb"],
  line: "#cdd4dd",
  lineHeavy: "#7b8794",
  ink: "#1b2026",
  soft: "#545d68",
  cell: "#ffffff",
  onKind: "#ffffff",
  kinds: ["#2563c9", "#b4540a", "#1f7a3f", "#7c3fc4", "#b0286f", "#0b7285", "#7a5c00", "#c02a2a"],
  groups: wheel(34, 86, 78),
  focus: "#1b2026",
  onFocus: "#ffffff",
  cause: "#c02a2a",
  waits: "#e9b44c",
  heat: ["#f3f5f8", "#f6c688", "#df8a3a", "#aa460a", "#591a00"],
  scale: (part) => hcl(255, 8 + 42 * part, 94 - 34 * part).formatHex(),
};

export const DARK: Colours = {
  paper: "#14181d",
  place: ["#1b2027", "#20262e", "#262d36", "#2c343e"],
  line: "#39424d",
  lineHeavy: "#8b97a5",
  ink: "#e8edf2",
  soft: "#a3aebb",
  cell: "#14181d",
  onKind: "#0c0f13",
  kinds: ["#79aef5", "#f0a35e", "#6cc788", "#bd98f2", "#ee8fbd", "#5cc3d4", "#d8b94a", "#f58a83"],
  groups: wheel(36, 43, 36),
  focus: "#f5f8fb",
  onFocus: "#14181d",
  cause: "#f58a83",
  waits: "#7a5d17",
  heat: ["#1d2228", "#633c12", "#a3611f", "#e4a759", "#ffefd9"],
  scale: (part) => hcl(255, 8 + 34 * part, 22 + 22 * part).formatHex(),
};

/** The place of a group's colour: each round begins elsewhere, lest every n-th group look alike. */
export const hueOf = (group: number): number => (group + 5 * Math.floor(group / HUES)) % HUES;

/** The colour of one group of many. */
export const groupColour = (colours: Colours, group: number): string => colours.groups[hueOf(group)];

/** The colour of a kind by its place among those that are shown. */
export const kindColour = (colours: Colours, place: number): string => colours.kinds[place % colours.kinds.length];

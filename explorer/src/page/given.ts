/** What `rankmesh explore` puts into the page: the layout, its cluster, a measurement, a hang. */
import type { ClusterData } from "../formula/cluster";
import type { PlanData } from "../formula/plan";
import type { State } from "./state";

/** `rankmesh measure --json`, as far as it is drawn. */
export interface Measured {
  backend: string;
  kinds: {
    name: string;
    collective: string;
    bytes: number;
    seconds: number;
    busbw: number;
    slowest: { ranks: number[]; hosts: string[] };
    /** Seconds of each group in the order of the plan, all at once. */
    groups?: number[];
  }[];
  slow_hosts: string[];
}

/** `rankmesh doctor --json`, with who waits for whom. */
export interface Hang {
  verdict: string;
  causes: {
    cause: string;
    ranks: number[];
    group: string;
    call: number;
    operation: string;
    evidence: string;
  }[];
  waiting: number[];
  turns: { call: string; waiting: number[]; missing: number[] }[];
  /** What is slow, the costliest first. */
  slow: { sentence: string }[];
  /** Seconds of a step, and of each step that others wait for each rank. */
  speed?: Speed | null;
}

export interface Speed {
  step: number;
  caused: number[];
}

export interface Given {
  state: Partial<State>;
  /** A plan that no SPEC says: a saved one, or one of a config. Its SPEC in the state is `given`. */
  plan?: PlanData;
  title?: string;
  cluster?: ClusterData;
  measured?: Measured;
  hang?: Hang;
}

/** Whether a diagnosis is given of more than a job that is slow. */
export const hangs = ({ hang }: Given): boolean =>
  hang !== undefined && (!hang.speed || hang.causes.length + hang.waiting.length > 0);

export const GIVEN = "given";

export function given(): Given {
  const text = document.getElementById("given")?.textContent;
  return (JSON.parse(text ?? "null") as Given | null) ?? { state: {} };
}

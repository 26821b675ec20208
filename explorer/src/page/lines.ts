/** The lines of a drawing: rings and pipelines of the rank that is pointed at, and who waits for whom. */
import type { Colours } from "./colours";
import { kindColour } from "./colours";
import type { Hang } from "./given";
import type { Model } from "./model";
import type { Line } from "./scene";

// Rings of more members are no help to the eye.
const RING = 64;

/** The ring of the chosen kind and the pipeline through one rank, and its neighbour in each. */
export function neighbours(
  model: Model,
  colours: Colours,
  kinds: readonly string[],
  chosen: string,
  rank: number,
): Line[] {
  if (!model.has(rank)) return [];
  const pipelines = kinds.filter((kind) => model.plan.spec(kind).axes.join() === "pp");
  const drawn = [...new Set([chosen, ...pipelines])].filter((kind) => model.plan.kinds.has(kind));
  return drawn.flatMap((kind) => {
    const local = model.plan.groups(kind).of(rank);
    if (!local || local.length < 2) return [];
    const colour = kindColour(colours, Math.max(0, kinds.indexOf(kind)));
    const place = local.indexOf(rank);
    const chain = pipelines.includes(kind);
    const next = local[(place + 1) % local.length];
    const ends = chain && place === local.length - 1;
    const ring: Line = {
      ranks: local,
      colour,
      closed: !chain,
      heavy: false,
      arrow: false,
    };
    const hop: Line = {
      ranks: [rank, next],
      colour,
      closed: false,
      heavy: true,
      arrow: true,
    };
    return [...(local.length > 2 && local.length <= RING ? [ring] : []), ...(ends ? [] : [hop])];
  });
}

// Of a large hang as many lines as can be followed.
const WAITS = 48;

/** A line from ranks that wait to the ranks that they wait for. */
export function waits(hang: Hang, colours: Colours): Line[] {
  const pairs = hang.turns.flatMap((step) =>
    step.missing.flatMap((missing) => step.waiting.map((waiting) => [waiting, missing])),
  );
  return pairs.slice(0, WAITS).map((ranks) => ({
    ranks,
    colour: colours.cause,
    closed: false,
    heavy: false,
    arrow: true,
  }));
}

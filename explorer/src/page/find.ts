/**
 * A search among ranks: a number, a coordinate, a host.
 *
 *     13      rank 13      tp=1,dp=3      tp 1 dp 3      node3
 */
import { int } from "../formula/axes";
import { quoted } from "../formula/messages";
import type { Model } from "./model";

export interface Found {
  readonly ranks: readonly number[];
  readonly text: string;
}

const MOST = 4096;

export function search(model: Model, text: string): Found {
  const { mesh } = model.plan;
  const number = int(text.replace(/^\s*rank\s*/i, ""));
  if (number !== undefined) {
    const inside = number >= 0 && number < model.plan.worldSize;
    return inside
      ? { ranks: [number], text: `rank ${number}` }
      : {
          ranks: [],
          text: `there is no rank ${number}; ranks go from 0 to ${model.plan.worldSize - 1}`,
        };
  }
  const host = model.cluster?.names[0].indexOf(text.trim()) ?? -1;
  if (host >= 0) {
    const units = model.cluster!.units[0];
    const ranks = all(model).filter((rank) => units[rank] === host);
    return { ranks, text: `host ${text.trim()}: ${ranks.length} ranks` };
  }
  const wanted = coordinateOf(text);
  if (!wanted.length)
    return {
      ranks: [],
      text: `cannot find ${quoted(text)}; write a rank (13), a coordinate (tp=1,dp=3) or a host (node3)`,
    };
  const view = [null, ...mesh.views.keys()].find((name) => wanted.every(([axis]) => mesh.view(name).sizes.has(axis)));
  if (view === undefined) {
    const known = [...new Set([...mesh.names, ...[...mesh.views.values()].flatMap((each) => each.names)])];
    return {
      ranks: [],
      text: `no coordinate ${quoted(text)}; the axes are ${known.join(", ")}`,
    };
  }
  const axes = mesh.view(view);
  const outside = wanted.find(([axis, at]) => at >= axes.sizes.get(axis)!);
  if (outside) {
    const size = axes.sizes.get(outside[0])!;
    return {
      ranks: [],
      text: `position ${outside[1]} is outside axis '${outside[0]}'; its size is ${size}, so positions go from 0 to ${size - 1}`,
    };
  }
  const steps = wanted.map(([axis, at]) => [axes.strideOf(axis), axes.sizes.get(axis)!, at] as const);
  const ranks = all(model).filter((rank) => {
    if (!model.has(rank)) return false;
    const position = mesh.rankRange.position(rank);
    return steps.every(([stride, size, at]) => Math.floor(position / stride) % size === at);
  });
  const shown = wanted.map(([axis, at]) => `${axis}=${at}`).join(", ");
  return {
    ranks: ranks.slice(0, MOST),
    text: `${shown}: ${ranks.length} rank${ranks.length === 1 ? "" : "s"}`,
  };
}

const all = (model: Model): number[] => Array.from({ length: model.plan.worldSize }, (_, rank) => rank);

/** `tp=1,dp=3`, `tp1 dp3` or `tp 1, dp 3`. */
function coordinateOf(text: string): [string, number][] {
  const joined = text.replace(/\s*=\s*|(?<=[a-z_])\s+(?=\d)/gi, "");
  const parts = joined.split(/[\s,]+/).filter(Boolean);
  const found = parts.map((part) => /^([a-z_]+)(\d+)$/i.exec(part));
  return found.every((match) => match !== null) ? found.map((match) => [match[1], Number(match[2])]) : [];
}

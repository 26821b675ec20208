/** Below the drawing: what its colours mean now, and ranks in words. */
import type { App } from "./app";
import { swatch } from "./card";
import { kindColour } from "./colours";
import { h, number, plural } from "./dom";
import type { Model } from "./model";
import { SHARES } from "./scene";

/** A rank in words: its host and its coordinate. */
export function rankText(model: Model, rank: number): string {
  const host = model.cluster ? ` on ${model.cluster.hostOf(rank)}` : "";
  if (!model.has(rank)) return `rank ${rank}${host}, outside the mesh`;
  const coordinate = [...model.plan.mesh.coordinate(rank)].map(([axis, at]) => `${axis} ${at}`).join(", ");
  return `rank ${rank}${host}: ${coordinate}`;
}

/** What the colours of the drawing mean now. */
export function legend(app: App): Node[] {
  const { model, colours, focus } = app;
  if (app.state.overlay === "hang" && app.given.hang)
    return [
      h("span", {}, swatch(colours.cause), "named as a cause"),
      h("span", {}, swatch(colours.waits), "waits"),
      h("span", {}, "a line leads to a rank that another waits for"),
    ];
  if (app.state.overlay === "slow" && app.given.hang?.speed)
    return [
      h("span", {}, "others wait for it:"),
      ...[0, ...SHARES].map((share, level) =>
        h("span", {}, swatch(colours.heat[level]), share ? `${100 * share} %` : "less"),
      ),
      h("span", {}, "of a step, or more"),
    ];
  if (focus !== null)
    return [
      h("b", {}, rankText(model, focus)),
      ...app.kinds.map((kind, place) => h("span", {}, swatch(kindColour(colours, place)), kind)),
    ];
  if (app.found.length) return [h("span", {}, swatch(colours.kinds[0]), plural(app.found.length, "rank"), " found")];
  const groups = model.plan.groups(app.kind);
  if (app.state.overlay === "measured" && app.given.measured)
    return [
      h("span", {}, swatch(colours.scale(0)), "slow"),
      h("span", {}, swatch(colours.scale(1)), `fastest of ${app.kind}`),
    ];
  const crossing = model.crossings(app.kind);
  const cross = crossing ? `, ${number(crossing.crossing)} cross hosts` : "";
  const text = `each colour is one group of ${app.kind}: ${plural(groups.count, "group")} of ${number(groups.size)}${cross}`;
  const { aggregate } = app.stage.view;
  const far = aggregate
    ? [
        h(
          "span",
          {},
          `each square stands for the ${number(aggregate.ranks)} ranks of one ${aggregate.name}; a hollow one holds more than four groups. Zoom in for ranks.`,
        ),
      ]
    : [];
  const changedText = app.compared
    ? [h("span", {}, swatch(colours.cause), `a corner: another group of ${app.kind}`)]
    : [];
  return [h("span", {}, ...[0, 1, 2].map((group) => swatch(colours.groups[group])), text), ...far, ...changedText];
}

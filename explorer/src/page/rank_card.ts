/** One rank: its coordinate, its groups, its neighbours, and what of them leaves the host. */
import type { Local } from "../formula/plan";
import type { App } from "./app";
import { badge, card, shortened, swatch } from "./card";
import { kindColour } from "./colours";
import { h, number, plural } from "./dom";

export function rankCard(app: App): HTMLElement {
  const { model, rank } = app;
  if (rank === null)
    return card(
      "Rank",
      h(
        "p",
        { class: "note" },
        "Point at a rank to see its groups, or tap it. A click pins it; pin a second rank to see what the two share. With the keyboard: Tab to the drawing, then the arrow keys and Enter.",
      ),
    );
  const title = `Rank ${number(rank)}${model.cluster ? ` on ${model.cluster.hostOf(rank)}` : ""}`;
  if (!model.has(rank))
    return card(title, h("p", { class: "note" }, "This rank is outside the mesh and has no groups."));
  const { mesh } = model.plan;
  const views = [null, ...mesh.views.keys()].map((view) =>
    h(
      "p",
      { class: "chips" },
      h("span", { class: "view" }, view ?? "mesh"),
      ...[...mesh.coordinate(rank, view)].map(([axis, at]) => h("span", { class: "chip" }, `${axis} `, h("b", {}, at))),
    ),
  );
  const local = model.plan.of(rank);
  const not = model.plan.specs.length - local.length;
  return card(
    title,
    ...views,
    h("p", { class: "formula" }, formula(app, rank)),
    groupsTable(app, local, rank),
    not ? h("p", { class: "note" }, `Not a member of ${plural(not, "kind")}: ${notIn(app, local)}.`) : null,
  );
}

const notIn = (app: App, local: readonly Local[]): string =>
  app.model.plan.specs
    .map((each) => each.name)
    .filter((name) => !local.some((group) => group.name === name))
    .join(", ");

function formula({ model }: App, rank: number): string {
  const { mesh } = model.plan;
  const terms = [...mesh.coordinate(rank)].map(([axis, at]) => `${axis} ${at}·${mesh.strideOf(axis)}`).join(" + ");
  return mesh.rankRange.map
    ? `${rank} = rank_map[${terms}]`
    : `${rank} = ${mesh.rankRange.offset ? `${mesh.rankRange.offset} + ` : ""}${terms}`;
}

// Groups of the leading kinds first, the others folded away.
function groupsTable(app: App, local: readonly Local[], rank: number): HTMLElement {
  const first = local
    .filter((group) => app.kinds.includes(group.name))
    .sort((a, b) => app.kinds.indexOf(a.name) - app.kinds.indexOf(b.name));
  const rest = local.filter((group) => !app.kinds.includes(group.name));
  return h(
    "div",
    {},
    localTable(app, first, rank, "Its groups, with their neighbours"),
    rest.length
      ? h(
          "details",
          {
            open: folded.open,
            ontoggle: (event: Event) => (folded.open = (event.target as HTMLDetailsElement).open),
          },
          h("summary", { "data-key": "rest" }, plural(rest.length, "more kind")),
          localTable(app, rest, rank, "Its other groups"),
        )
      : null,
  );
}

const folded = { open: false };

function localTable(app: App, local: readonly Local[], rank: number, caption: string): HTMLElement {
  const { cluster } = app.model;
  const heads = ["group", "position", "prev", "next", ...(cluster ? ["within"] : [])];
  const rows = local.flatMap((group) => {
    const { groups, index, rank: place } = group;
    const size = groups.size;
    const colour = app.kinds.indexOf(group.name);
    const at = (step: number): number => groups.member(index, (place + step + size) % size);
    const members = groups.group(index, 6);
    const level = cluster ? app.model.reachOf(group.name, index) : 0;
    const hop = (to: number): HTMLElement | string =>
      cluster && cluster.levelOf(rank, to) > 0
        ? h("span", { class: "crosses", title: `on ${cluster.hostOf(to)}` }, number(to))
        : number(to);
    const main = h(
      "tr",
      {},
      h("th", { scope: "row" }, colour < 0 ? null : swatch(kindColour(app.colours, colour)), group.name),
      h("td", {}, `${place + 1} of ${number(size)}`),
      h("td", { class: "number" }, size > 1 ? hop(at(-1)) : "–"),
      h("td", { class: "number" }, size > 1 ? hop(at(1)) : "–"),
      cluster ? h("td", {}, size > 1 ? badge(cluster.levels[level], level) : "one rank") : null,
    );
    const shares =
      group.communicator !== null && group.communicator !== group.name ? `, shares ${group.communicator}'s` : "";
    return [
      main,
      h("tr", { class: "members" }, h("td", { colspan: heads.length }, `[${shortened(members, size)}]${shares}`)),
    ];
  });
  return h(
    "table",
    {},
    h("caption", { class: "unseen" }, caption),
    h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, ...rows),
  );
}

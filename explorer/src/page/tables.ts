/** Everything as tables: for those who do not see colours, or read with the ears. */
import { useText } from "../formula/communicators";
import { coalesced, patternText } from "../formula/strided";
import type { App } from "./app";
import { h, number, plural } from "./dom";

const ROWS = 64;
const MEMBERS = 32;
/** The first row that each long table shows. */
const from: Record<string, number> = {};

export function tables(app: App): Node[] {
  return [axes(app), kinds(app), groups(app), ranks(app), ...hosts(app)];
}

type Cell = string | number;

function table(
  caption: string,
  heads: readonly string[],
  rows: readonly (readonly Cell[])[],
  more: Node | null = null,
): HTMLElement {
  const cell = (value: Cell, place: number): HTMLElement => {
    const shown = typeof value === "number" ? number(value) : value;
    return place
      ? h("td", { class: typeof value === "number" ? "number" : null }, shown)
      : h("th", { scope: "row" }, shown);
  };
  const numeric = (place: number): boolean => rows.length > 0 && typeof rows[0][place] === "number" && place > 0;
  return h(
    "section",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ...heads.map((head, place) => h("th", { scope: "col", class: numeric(place) ? "number" : null }, head)),
        ),
      ),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map(cell)))),
    ),
    more,
  );
}

/** The rows of a long table that are shown, and buttons to the others. */
function paged(
  app: App,
  key: string,
  count: number,
  row: (place: number) => Cell[],
): { rows: Cell[][]; more: Node | null } {
  const start = Math.min(from[key] ?? 0, Math.floor((count - 1) / ROWS) * ROWS);
  const stop = Math.min(count, start + ROWS);
  const rows = Array.from({ length: stop - start }, (_, place) => row(start + place));
  if (count <= ROWS) return { rows, more: null };
  const go = (text: string, to: number): HTMLElement =>
    h(
      "button",
      {
        type: "button",
        "data-key": `${key} ${text}`,
        disabled: to < 0 || to >= count,
        onclick: () => {
          from[key] = to;
          app.stage.render();
        },
      },
      text,
    );
  const last = Math.floor((count - 1) / ROWS) * ROWS;
  return {
    rows,
    more: h(
      "p",
      { class: "pages" },
      go("First", start ? 0 : -1),
      go("Previous", start - ROWS),
      `${number(start + 1)} to ${number(stop)} of ${number(count)}`,
      go("Next", start + ROWS),
      go("Last", start === last ? count : last),
    ),
  };
}

function axes({ model }: App): HTMLElement {
  const { mesh } = model.plan;
  const rows = [null, ...mesh.views.keys()].flatMap((view) =>
    [...mesh.view(view).sizes].map(([name, size]) => [name, view ?? "mesh", size, mesh.view(view).strideOf(name)]),
  );
  return table("Axes", ["axis", "layout", "size", "stride"], rows);
}

function kinds({ model }: App): HTMLElement {
  const heads = [
    "kind",
    "axes",
    "view",
    "groups",
    "size",
    "members",
    "communicator",
    ...(model.cluster ? ["cross hosts", "hosts", "hops", "within"] : []),
  ];
  const rows = model.plan.specs.map((each): Cell[] => {
    const found = model.plan.groups(each.name);
    const crossing = model.crossings(each.name);
    const row = [
      each.name,
      each.axes.join("-"),
      each.view ?? "",
      found.count,
      found.size,
      patternText(coalesced(found.members)),
      useText(model.communicators.kinds.get(each.name)!),
    ];
    return crossing ? [...row, crossing.crossing, crossing.nodes, crossing.hops, model.levelOf(each.name)!] : row;
  });
  return table("Kinds of group", heads, rows);
}

function groups(app: App): HTMLElement {
  const { model, kind } = app;
  const found = model.plan.groups(kind);
  const { rows, more } = paged(app, "groups", found.count, (index) => {
    const members = found.group(index, MEMBERS);
    const left = found.size > MEMBERS ? `, … ${number(found.size)} ranks` : "";
    const row: Cell[] = [`${kind} ${index}`, `[${members.join(", ")}${left}]`];
    return model.cluster ? [...row, model.cluster.levels[model.reachOf(kind, index)]] : row;
  });
  return table(`Groups of ${kind}`, ["group", "members", ...(model.cluster ? ["within"] : [])], rows, more);
}

function ranks(app: App): HTMLElement {
  const { model } = app;
  const { mesh } = model.plan;
  const layouts = [null, ...mesh.views.keys()];
  const heads = layouts.flatMap((view) => mesh.view(view).names.map((name) => (view ? `${name} (${view})` : name)));
  const { rows, more } = paged(app, "ranks", model.plan.worldSize, (rank) => {
    const place = model.has(rank)
      ? layouts.flatMap((view) => [...mesh.coordinate(rank, view).values()])
      : heads.map(() => "");
    return [`rank ${rank}`, ...(model.cluster ? [model.cluster.hostOf(rank)] : []), ...place];
  });
  return table("Ranks", ["rank", ...(model.cluster ? ["host"] : []), ...heads], rows, more);
}

function hosts(app: App): HTMLElement[] {
  const { cluster, plan } = app.model;
  if (!cluster) return [];
  const byHost = new Map<number, number[]>();
  cluster.units[0]
    .subarray(0, plan.worldSize)
    .forEach((host, rank) => byHost.set(host, [...(byHost.get(host)?.slice(0, MEMBERS) ?? []), rank]));
  const list = [...byHost];
  const { rows, more } = paged(app, "hosts", list.length, (place) => {
    const [host, inside] = list[place];
    const units = cluster.levels
      .slice(1)
      .map((_, level) => cluster.names[level + 1][cluster.units[level + 1][inside[0]]]);
    return [cluster.names[0][host], ...units, inside.join(", ")];
  });
  return [table(plural(list.length, "host"), ["host", ...cluster.levels.slice(1), "ranks"], rows, more)];
}

/** The right: a search, the rank that is pointed at, the pins, the comparison, and the kinds. */
import { useText } from "../formula/communicators";
import { difference } from "../formula/difference";
import type { Own } from "../formula/plan";
import { pickText } from "../formula/plan";
import { patternText } from "../formula/strided";
import type { App } from "./app";
import { kindColour } from "./colours";
import { h, number, plural } from "./dom";
import { search } from "./find";
import { speedsOf, speedText } from "./scene";
import { rankWords } from "./stage";

export function inspector(app: App): Node[] {
  return [
    searchBox(app),
    ...hang(app),
    rankCard(app),
    ...pinCard(app),
    ...compareCard(app),
    kindsCard(app),
    kindCard(app),
  ];
}

const card = (title: string, ...body: (Node | null)[]): HTMLElement =>
  h("section", { class: "card" }, h("h2", {}, title), ...body);
const swatch = (colour: string): HTMLElement =>
  h("span", {
    class: "swatch",
    style: `background:${colour}`,
    "aria-hidden": "true",
  });

// -- search -------------------------------------------------------------------------------------------------------

let searched = { text: "", words: "" };

function searchBox(app: App): HTMLElement {
  const input = h("input", {
    type: "text",
    id: "search",
    placeholder: "13, tp=1,dp=3, node3",
    "data-key": "search",
    autocomplete: "off",
    value: searched.text,
    oninput: () => {
      searched = { ...searched, text: input.value };
    },
  });
  const go = (event: Event): void => {
    event.preventDefault();
    const { ranks, words } = search(app.model, input.value);
    searched = { text: input.value, words };
    app.hover = null;
    app.found = ranks.length > 1 ? ranks : [];
    app.set({ rank: ranks.length === 1 ? ranks[0] : null });
    if (ranks.length) app.stage.view.reveal(ranks[0]);
    app.say(words);
  };
  return h(
    "form",
    { class: "search", role: "search", onsubmit: go },
    h("label", { for: "search" }, "Find ranks"),
    h("span", {}, input, h("button", { "data-key": "find" }, "Find")),
    searched.words ? h("p", { class: "note" }, searched.words) : null,
  );
}

// -- what hangs ---------------------------------------------------------------------------------------------------

function hang(app: App): HTMLElement[] {
  const found = app.given.hang;
  if (!found) return [];
  const causes = found.causes
    .slice(0, 8)
    .map((cause) =>
      h(
        "li",
        {},
        h("b", {}, cause.cause),
        ` ${cause.operation}, call ${cause.call} of ${cause.group}: ${plural(cause.ranks.length, "rank")} (${shortened(cause.ranks, cause.ranks.length)})`,
      ),
    );
  const turns = found.turns
    .slice(0, 6)
    .map((turn) =>
      h(
        "li",
        {},
        `${turn.call}: ${shortened(turn.waiting, turn.waiting.length)} for ${shortened(turn.missing, turn.missing.length)}`,
      ),
    );
  return [
    card(
      "What hangs",
      h("p", {}, found.verdict),
      h("ul", {}, ...causes),
      turns.length ? h("h3", {}, "Who waits for whom") : null,
      h("ul", {}, ...turns),
    ),
  ];
}

// -- one rank -----------------------------------------------------------------------------------------------------

function rankCard(app: App): HTMLElement {
  const { model, rank } = app;
  if (rank === null)
    return card(
      "Rank",
      h(
        "p",
        { class: "note" },
        "Point at a rank to see its groups. Click it to pin it; a second pin says what the two share. With the keyboard: Tab to the drawing, then the arrow keys and Enter.",
      ),
    );
  const title = `Rank ${number(rank)}${model.cluster ? ` on ${model.cluster.hostOf(rank)}` : ""}`;
  if (!model.has(rank)) return card(title, h("p", { class: "note" }, "It is outside the mesh: it has no groups."));
  const { mesh } = model.plan;
  const views = [null, ...mesh.views.keys()].map((view) =>
    h(
      "p",
      { class: "chips" },
      h("span", { class: "view" }, view ?? "mesh"),
      ...[...mesh.coordinate(rank, view)].map(([axis, at]) => h("span", { class: "chip" }, `${axis} `, h("b", {}, at))),
    ),
  );
  const own = model.plan.of(rank);
  const not = model.plan.specs.length - own.length;
  return card(
    title,
    ...views,
    h("p", { class: "formula" }, formula(app, rank)),
    groupsTable(app, own, rank),
    not ? h("p", { class: "note" }, `Picks leave it out of ${plural(not, "kind")}: ${notIn(app, own)}.`) : null,
  );
}

const notIn = (app: App, own: readonly Own[]): string =>
  app.model.plan.specs
    .map((each) => each.name)
    .filter((name) => !own.some((group) => group.name === name))
    .join(", ");

function formula({ model }: App, rank: number): string {
  const { mesh } = model.plan;
  const terms = [...mesh.coordinate(rank)].map(([axis, at]) => `${axis} ${at}·${mesh.strideOf(axis)}`).join(" + ");
  return mesh.span.map
    ? `${rank} = rank_map[${terms}]`
    : `${rank} = ${mesh.span.offset ? `${mesh.span.offset} + ` : ""}${terms}`;
}

// Groups of the leading kinds first, the others folded away.
function groupsTable(app: App, own: readonly Own[], rank: number): HTMLElement {
  const first = own
    .filter((group) => app.kinds.includes(group.name))
    .sort((a, b) => app.kinds.indexOf(a.name) - app.kinds.indexOf(b.name));
  const rest = own.filter((group) => !app.kinds.includes(group.name));
  return h(
    "div",
    {},
    ownTable(app, first, rank, "Its groups, with their neighbours"),
    rest.length
      ? h(
          "details",
          {
            open: folded.open,
            ontoggle: (event: Event) => {
              folded.open = (event.target as HTMLDetailsElement).open;
            },
          },
          h("summary", { "data-key": "rest" }, plural(rest.length, "more kind")),
          ownTable(app, rest, rank, "Its other groups"),
        )
      : null,
  );
}

const folded = { open: false };

function ownTable(app: App, own: readonly Own[], rank: number, caption: string): HTMLElement {
  const { cluster } = app.model;
  const heads = ["group", "place", "prev", "next", ...(cluster ? ["within"] : [])];
  const rows = own.flatMap((group) => {
    const { groups, index, rank: place } = group;
    const size = groups.size;
    const place0 = app.kinds.indexOf(group.name);
    const at = (step: number): number => groups.member(index, (place + step + size) % size);
    const members = groups.group(index, 6);
    const level = cluster ? cluster.reach(groups.group(index, 4096)) : 0;
    const hop = (to: number): HTMLElement | string =>
      cluster && cluster.levelOf(rank, to) > 0
        ? h("span", { class: "crosses", title: `on ${cluster.hostOf(to)}` }, number(to))
        : number(to);
    const main = h(
      "tr",
      {},
      h("th", { scope: "row" }, place0 < 0 ? null : swatch(kindColour(app.colours, place0)), group.name),
      h("td", {}, `${place + 1} of ${number(size)}`),
      h("td", { class: "number" }, size > 1 ? hop(at(-1)) : "–"),
      h("td", { class: "number" }, size > 1 ? hop(at(1)) : "–"),
      cluster ? h("td", {}, size > 1 ? badge(cluster.levels[level], level) : "alone") : null,
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

const badge = (name: string, level: number): HTMLElement =>
  h("span", { class: level ? "badge crosses" : "badge" }, name);
const shortened = (ranks: readonly number[], size: number): string =>
  `${ranks.slice(0, 6).join(", ")}${size > 6 ? `, … ${number(size)} ranks` : ""}`;

// -- pins ---------------------------------------------------------------------------------------------------------

function pinCard(app: App): HTMLElement[] {
  const { pins, model } = app;
  if (!pins.length) return [];
  const clear = h(
    "button",
    {
      type: "button",
      class: "quiet",
      "data-key": "unpin",
      onclick: () => {
        app.set({ pins: [] });
      },
    },
    "Unpin",
  );
  const lines = pins.map((rank, place) =>
    h("p", {}, h("span", { class: "pin" }, "AB"[place]), ` ${rankWords(model, rank)}`),
  );
  if (pins.length < 2)
    return [card("Pinned", ...lines, h("p", { class: "note" }, "Pin a second rank to see what they share."), clear)];
  const [one, other] = pins;
  const shared = model.plan.specs.filter(({ name }) => {
    const groups = model.plan.groups(name);
    return groups.size > 1 && groups.has(one) && groups.has(other) && groups.indexOf(one) === groups.indexOf(other);
  });
  const level = model.cluster?.levelOf(one, other);
  const near =
    level === undefined
      ? null
      : h(
          "p",
          {},
          level
            ? `They are on two hosts; ${model.cluster!.levels[level]} is the innermost level that holds both.`
            : "They are on one host.",
        );
  const words = shared.length
    ? `${plural(shared.length, "kind")} of ${model.plan.specs.length} put them into one group: ${shared.map((each) => each.name).join(", ")}.`
    : "They share no group.";
  return [card("Pinned", ...lines, h("p", {}, words), near, clear)];
}

// -- comparison ---------------------------------------------------------------------------------------------------

function compareCard(app: App): HTMLElement[] {
  if (!app.compared || !app.state.compare) return [];
  const found = difference(app.model.plan, app.compared.plan);
  const worlds = [app.model.plan.worldSize, app.compared.plan.worldSize];
  const rows = found.groups.map((kind) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, kind.name),
      h("td", { class: "number" }, number(kind.ranks)),
      h(
        "td",
        {},
        kind.leftSize === kind.rightSize
          ? number(kind.leftSize)
          : `${number(kind.leftSize)} → ${number(kind.rightSize)}`,
      ),
    ),
  );
  const list = (title: string, names: readonly string[]): HTMLElement | null =>
    names.length ? h("p", {}, h("b", {}, title), ` ${names.join(", ")}`) : null;
  const axes = found.axes.map(({ view, axis, left, right }) =>
    h("li", {}, `${view ? `${view}: ` : ""}${axis} ${left ?? "none"} → ${right ?? "none"}`),
  );
  return [
    card(
      "What changed",
      worlds[0] === worlds[1] ? null : h("p", {}, `${number(worlds[0])} → ${number(worlds[1])} ranks`),
      axes.length ? h("ul", {}, ...axes) : h("p", {}, "The axes are the same."),
      rows.length
        ? h(
            "table",
            {},
            h("caption", {}, "Kinds whose groups differ"),
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                h("th", { scope: "col" }, "kind"),
                h("th", { scope: "col", class: "number" }, "ranks"),
                h("th", { scope: "col" }, "size"),
              ),
            ),
            h("tbody", {}, ...rows),
          )
        : null,
      list("only before:", found.onlyLeft),
      list("only after:", found.onlyRight),
      list("equal:", found.equal),
    ),
  ];
}

// -- kinds --------------------------------------------------------------------------------------------------------

function kindsCard(app: App): HTMLElement {
  const { model } = app;
  const heads = ["kind", "groups", "size", ...(model.cluster ? ["within"] : [])];
  const rows = model.plan.specs.map(({ name }) => {
    const groups = model.plan.groups(name);
    const place = app.kinds.indexOf(name);
    const choose = (): void => {
      app.set({ kind: name });
    };
    const chosen = name === app.kind;
    const level = model.levelOf(name);
    return h(
      "tr",
      { class: chosen ? "chosen" : null },
      h(
        "th",
        { scope: "row" },
        h(
          "button",
          {
            type: "button",
            class: "kind",
            "aria-pressed": chosen ? "true" : "false",
            "data-key": `kind ${name}`,
            onclick: choose,
          },
          swatch(place < 0 ? "transparent" : kindColour(app.colours, place)),
          name,
        ),
      ),
      h("td", { class: "number" }, number(groups.count)),
      h("td", { class: "number" }, number(groups.size)),
      model.cluster
        ? h("td", {}, groups.size > 1 ? badge(level!, model.cluster.levels.indexOf(level!)) : "alone")
        : null,
    );
  });
  return card(
    "Kinds of group",
    h(
      "table",
      { class: "kinds" },
      h("caption", { class: "unseen" }, "Kinds of group; choose one to colour its groups"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ...heads.map((head, place) =>
            h(
              "th",
              {
                scope: "col",
                class: place === 1 || place === 2 ? "number" : null,
              },
              head,
            ),
          ),
        ),
      ),
      h("tbody", {}, ...rows),
    ),
  );
}

function kindCard(app: App): HTMLElement {
  const { model, kind } = app;
  const each = model.plan.spec(kind);
  const groups = model.plan.groups(kind);
  const use = model.communicators.kinds.get(kind)!;
  const part = [
    each.levels ? `level ${each.level} of ${each.levels.join("x")}` : "",
    each.pick ? pickText(each.pick) : "",
  ]
    .filter(Boolean)
    .join(", ");
  const shares = model.plan.sharing.find((names) => names.includes(kind))!.filter((name) => name !== kind);
  const facts: [string, string][] = [
    ["axes", each.axes.join("-") + (each.view ? ` of view ${each.view}` : "")],
    ...(part ? [["part", part] as [string, string]] : []),
    ["groups", `${number(groups.count)} of ${plural(groups.size, "rank")}`],
    ["members", `${patternText(groups.members)} (sizes x strides)`],
    ["communicator", useText(use)],
    ...(shares.length ? [["the same groups", shares.join(", ")] as [string, string]] : []),
    ...Object.entries(each.options ?? {}).map(([name, value]): [string, string] => [name, JSON.stringify(value)]),
  ];
  return card(
    `Kind ${kind}`,
    h("dl", {}, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    reach(app, kind),
    measured(app, kind),
  );
}

/** How many groups end at each level, as a bar and in words. */
function reach(app: App, kind: string): HTMLElement | null {
  const found = app.model.crossings(kind);
  if (!found || app.model.plan.groups(kind).size === 1) return null;
  const { levels } = app.model.cluster!;
  const parts = found.reach.map((count, level) => ({ count, level })).filter(({ count }) => count);
  const bar = h(
    "div",
    { class: "reach", "aria-hidden": "true" },
    ...parts.map(({ count, level }) =>
      h("span", {
        class: `level${Math.min(level, 3)}`,
        style: `flex-grow:${count}`,
      }),
    ),
  );
  const words = parts.map(({ count, level }) => `${number(count)} within one ${levels[level]}`).join(", ");
  const hops = found.hops
    ? ` A ring takes up to ${found.hops} hops between hosts, on ${plural(found.nodes, "host")}.`
    : "";
  return h("div", {}, bar, h("p", {}, `${words}.${hops}`));
}

function measured(app: App, kind: string): HTMLElement | null {
  const found = app.given.measured;
  const rows = found?.kinds.filter((row) => row.name === kind) ?? [];
  if (!found || !rows.length) return null;
  const speeds = speedsOf(found, kind, app.model.plan.groups(kind).count).filter((speed) => speed !== null);
  const slow = found.slow_hosts.length ? ` Slow hosts: ${found.slow_hosts.join(", ")}.` : "";
  return h(
    "div",
    {},
    h("h3", {}, "Measured"),
    h(
      "p",
      {},
      `${speedText(Math.min(...speeds))} to ${speedText(Math.max(...speeds))} of bus bandwidth, all groups at once (${found.backend}).${slow}`,
    ),
    h(
      "ul",
      {},
      ...rows.map((row) =>
        h(
          "li",
          {},
          `${row.collective} of ${number(row.bytes)} bytes: ${speedText(row.busbw)}, slowest [${shortened(row.slowest.ranks, row.slowest.ranks.length)}] on ${row.slowest.hosts.slice(0, 3).join(", ")}`,
        ),
      ),
    ),
  );
}

/** The left: sizes and order of the layout, devices a host and the levels around them. */
import { int } from "../formula/axes";
import { RECIPES } from "../formula/source";
import type { App } from "./app";
import { h, plural } from "./dom";
import {
  formOf,
  fresh,
  moved,
  narrowed,
  resized,
  shifted,
  specOf,
  stepped,
  translated,
  widened,
  withExperts,
  type AxesForm,
  type AxesLayout,
  type Form,
  type RecipeForm,
} from "./form";
import { GIVEN } from "./given";

export function controls(app: App): Node[] {
  const form = formOf(app.state.spec);
  return [
    h(
      "section",
      {},
      h("h2", {}, "Layout"),
      ...(app.state.spec === GIVEN
        ? saved(app)
        : form
          ? [family(app, form), ...fields(app, form)]
          : [h("p", { class: "note" }, "Write a layout above.")]),
    ),
    h("section", {}, h("h2", {}, "Machine"), ...machine(app)),
    h("section", {}, h("h2", {}, "World"), h("p", { class: "note" }, worldWords(app))),
  ];
}

function worldWords({ model, error }: App): string {
  const { plan, cluster } = model;
  const use = model.communicators;
  const each = use.least === use.most ? `${use.least}` : `${use.least} to ${use.most}`;
  const hosts = cluster ? ` on ${plural(new Set(cluster.units[0].subarray(0, plan.worldSize)).size, "host")}` : "";
  const words = `${plural(plan.worldSize, "rank")}${hosts}. Communicators: ${each} a rank, ${use.total.toLocaleString("en")} in the job.`;
  return error ? `${words} This is the last layout that could be.` : words;
}

function saved(app: App): Node[] {
  const axes = [...app.model.plan.mesh.sizes].map(([name, size]) => `${name}=${size}`).join(",");
  const edit = (): void => {
    app.set({ spec: axes });
  };
  return [
    h(
      "p",
      { class: "note" },
      `${app.given.title ?? "A saved plan"}: ${plural(app.model.plan.specs.length, "kind")} of group, as they were saved.`,
    ),
    h("button", { type: "button", "data-key": "edit", onclick: edit }, "Play with its axes"),
  ];
}

function family(app: App, form: Form): HTMLElement {
  const chosen = form.type === "axes" ? "axes" : form.recipe;
  const change = (event: Event): void => {
    const { value } = event.target as HTMLSelectElement;
    app.set({
      spec: specOf(translated(form, value, [...app.model.plan.mesh.sizes])),
      world: null,
    });
  };
  const names = ["axes", ...Object.keys(RECIPES)];
  return h(
    "label",
    { class: "row" },
    h("span", {}, "Groups of"),
    h(
      "select",
      { "data-key": "family", onchange: change },
      ...names.map((name) => h("option", { value: name, selected: name === chosen }, name)),
    ),
  );
}

const fields = (app: App, form: Form): Node[] =>
  form.type === "axes" ? axesFields(app, form) : recipeFields(app, form);

// -- axes ---------------------------------------------------------------------------------------------------------

function axesFields(app: App, form: AxesForm): Node[] {
  const edit = (next: AxesForm): void => {
    app.set({ spec: specOf(next) });
  };
  const layouts = form.layouts.map((layout) => axesField(form, layout, edit));
  const open = form.layouts.some((layout) => layout.axes.some((axis) => axis.size === "*"));
  const world = sizeRow("world", app.state.world === null ? "" : `${app.state.world}`, (size) => {
    app.set({ world: int(size) ?? null });
  });
  const experts = h(
    "button",
    {
      type: "button",
      class: "quiet",
      "data-key": "experts",
      onclick: () => {
        edit(withExperts(form));
      },
    },
    "Add a view for experts",
  );
  return [
    ...layouts,
    ...(open || app.state.world !== null ? [world] : []),
    ...(form.layouts.length < 2 ? [experts] : []),
  ];
}

function axesField(form: AxesForm, { view, axes }: AxesLayout, edit: (form: AxesForm) => void): HTMLElement {
  const title = view === null ? "Mesh, adjacent ranks first" : `View ${view}`;
  const rows = axes.map((axis, place) =>
    h(
      "div",
      { class: "row" },
      ...sizeRow(
        axis.name,
        axis.size,
        (size) => {
          edit(resized(form, view, axis.name, size));
        },
        view ?? "",
      ).childNodes,
      h(
        "span",
        { class: "moves" },
        small("↑", `${axis.name} earlier`, view, place > 0, () => {
          edit(moved(form, view, place, place - 1));
        }),
        small("↓", `${axis.name} later`, view, place < axes.length - 1, () => {
          edit(moved(form, view, place, place + 1));
        }),
        small("×", `remove ${axis.name}`, view, axes.length > 1, () => {
          edit(narrowed(form, view, axis.name));
        }),
      ),
    ),
  );
  return h(
    "fieldset",
    {},
    h("legend", {}, title),
    ...rows,
    adder(
      form,
      view,
      axes.map((axis) => axis.name),
      edit,
    ),
  );
}

function adder(
  form: AxesForm,
  view: string | null,
  taken: readonly string[],
  edit: (form: AxesForm) => void,
): HTMLElement {
  const input = h("input", {
    type: "text",
    placeholder: "axis",
    "aria-label": `name of an axis to add${view ? ` to ${view}` : ""}`,
    "data-key": `new ${view ?? ""}`,
    autocomplete: "off",
  });
  const add = (event: Event): void => {
    event.preventDefault();
    if (fresh(input.value.trim(), taken)) edit(widened(form, view, input.value.trim()));
  };
  return h("form", { class: "row add", onsubmit: add }, input, h("button", { class: "quiet" }, "Add axis"));
}

const small = (sign: string, label: string, view: string | null, enabled: boolean, act: () => void): HTMLElement =>
  h(
    "button",
    {
      type: "button",
      class: "small",
      "aria-label": view ? `${label} in ${view}` : label,
      "data-key": `${view ?? ""} ${label}`,
      disabled: !enabled,
      onclick: act,
    },
    sign,
  );

/** A label, a size, and buttons that halve and double it. */
function sizeRow(name: string, size: string, edit: (size: string) => void, group = "", follows = ""): HTMLElement {
  const label = group ? `${name} in ${group}` : name;
  const input = h("input", {
    type: "text",
    inputmode: "numeric",
    value: size,
    placeholder: follows,
    "aria-label": label,
    "data-key": `size ${label}`,
    autocomplete: "off",
    oninput: () => {
      edit(input.value.trim());
    },
    onkeydown: (event: KeyboardEvent) => {
      if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
      event.preventDefault();
      edit(`${Math.max(1, (int(size || follows) ?? 1) + (event.key === "ArrowUp" ? 1 : -1))}`);
    },
  });
  const step = (sign: string, up: boolean): HTMLElement =>
    h(
      "button",
      {
        type: "button",
        class: "small",
        "aria-label": `${up ? "double" : "halve"} ${label}`,
        "data-key": `${sign} ${label}`,
        disabled: size === "*",
        onclick: () => {
          edit(stepped(size || follows, up));
        },
      },
      sign,
    );
  return h(
    "div",
    { class: "row" },
    h("span", { class: "name", "aria-hidden": "true" }, name),
    h("span", { class: "stepper" }, step("−", false), input, step("+", true)),
  );
}

// -- recipes ------------------------------------------------------------------------------------------------------

// What follows anew where one of the two is changed.
const FOLLOWS: Partial<Record<string, string[]>> = { world: ["dp", "dp_shard"], dp: ["world"], dp_shard: ["world"] };
// What most layouts say; the rest is folded away.
const FIRST = new Set("world tp cp dp pp ep etp order dp_shard dp_replicate sp dcp pcp attn_dp".split(" "));

function recipeFields(app: App, form: RecipeForm): Node[] {
  const { parameters } = RECIPES[form.recipe];
  const edit = (name: string, value: string): void => {
    const anew = Object.fromEntries((FOLLOWS[name] ?? []).map((other) => [other, ""]));
    app.set({ spec: specOf({ ...form, values: { ...form.values, ...anew, [name]: value } }), world: null });
  };
  const rows = Object.entries(parameters).map(([name, kind]): [string, HTMLElement] => {
    const value = form.values[name] ?? "";
    if (name === "order")
      return [
        name,
        orderField(form, (order) => {
          edit("order", order);
        }),
      ];
    if (kind === "int")
      return [
        name,
        sizeRow(
          name,
          value,
          (size) => {
            edit(name, size);
          },
          "",
          followed(app, name),
        ),
      ];
    if (kind === "bool")
      return [
        name,
        checkRow(name, ["true", "yes", "1"].includes(value.toLowerCase()), (on) => {
          edit(name, on ? "true" : "");
        }),
      ];
    return [
      name,
      textRow(name, value, kind === "sizes" ? "2x4" : "", (text) => {
        edit(name, text);
      }),
    ];
  });
  const more = rows.filter(([name]) => !FIRST.has(name)).map(([, row]) => row);
  const open = Object.keys(form.values).some((name) => !FIRST.has(name) && form.values[name]);
  return [
    h(
      "fieldset",
      {},
      h("legend", {}, "Sizes; what is empty follows"),
      ...rows.filter(([name]) => FIRST.has(name) && name !== "order").map(([, row]) => row),
    ),
    ...rows.filter(([name]) => name === "order").map(([, row]) => row),
    ...(more.length ? [h("details", { open }, h("summary", { "data-key": "more" }, "More arguments"), ...more)] : []),
  ];
}

/** The size that an empty argument has: what followed, or 1. */
function followed({ model }: App, name: string): string {
  const { mesh } = model.plan;
  if (name === "world") return `${model.plan.worldSize}`;
  const sizes = [mesh, ...mesh.views.values()].find((layout) => layout.sizes.has(name))?.sizes;
  return `${sizes?.get(name) ?? 1}`;
}

function orderField(form: RecipeForm, edit: (order: string) => void): HTMLElement {
  const order = (form.values.order || "tp-cp-ep-dp-pp").split("-");
  const rows = order.map((axis, place) =>
    h(
      "li",
      {},
      h("span", { class: "name" }, axis),
      small("↑", `${axis} earlier`, "order", place > 0, () => {
        edit(shifted(order, place, place - 1).join("-"));
      }),
      small("↓", `${axis} later`, "order", place < order.length - 1, () => {
        edit(shifted(order, place, place + 1).join("-"));
      }),
    ),
  );
  return h("fieldset", {}, h("legend", {}, "Order, adjacent ranks first"), h("ol", { class: "order" }, ...rows));
}

const checkRow = (name: string, on: boolean, edit: (on: boolean) => void): HTMLElement =>
  h(
    "label",
    { class: "row" },
    h("span", { class: "name" }, name),
    h("input", {
      type: "checkbox",
      checked: on,
      "data-key": name,
      onchange: (event: Event) => {
        edit((event.target as HTMLInputElement).checked);
      },
    }),
  );

const textRow = (name: string, value: string, placeholder: string, edit: (text: string) => void): HTMLElement =>
  h(
    "label",
    { class: "row" },
    h("span", { class: "name" }, name),
    h("input", {
      type: "text",
      value,
      placeholder,
      "data-key": name,
      oninput: (event: Event) => {
        edit((event.target as HTMLInputElement).value.trim());
      },
    }),
  );

// -- the machine --------------------------------------------------------------------------------------------------

interface Machine {
  devices: string;
  levels: { name: string; size: string }[];
}

function machineOf(text: string): Machine {
  if (!text.includes("=")) return { devices: text, levels: [] };
  const [first, ...levels] = text.split(",").map((item) => {
    const [name, size = ""] = item.split("=");
    return { name: name.trim(), size: size.trim() };
  });
  return { devices: first.size, levels };
}

const machineText = ({ devices, levels }: Machine): string =>
  levels.length ? [`host=${devices}`, ...levels.map(({ name, size }) => `${name}=${size}`)].join(",") : devices;

const LEVELS = ["nvlink", "leaf", "spine", "core"];

function machine(app: App): Node[] {
  if (app.state.cluster === GIVEN)
    return [
      h("p", { class: "note" }, app.model.cluster?.toString() ?? ""),
      h(
        "button",
        {
          type: "button",
          "data-key": "machine",
          onclick: () => {
            app.set({ cluster: `${app.model.cluster?.devices[0] ?? 8}` });
          },
        },
        "Play with another machine",
      ),
    ];
  const now = machineOf(app.state.cluster);
  const edit = (next: Machine): void => {
    app.set({ cluster: machineText(next) });
  };
  const rows = now.levels.map((level, place) => {
    const resize = (size: string): void => {
      edit({
        ...now,
        levels: now.levels.map((each, other) => (other === place ? { ...each, size } : each)),
      });
    };
    const below = place ? now.levels[place - 1].name : "host";
    return h(
      "div",
      { class: "row" },
      ...sizeRow(level.name, level.size, resize, `of ${below}s`).childNodes,
      small("×", `remove ${level.name}`, "machine", true, () => {
        edit({
          ...now,
          levels: now.levels.filter((_, other) => other !== place),
        });
      }),
    );
  });
  const name = LEVELS.find((each) => !now.levels.some((level) => level.name === each));
  const add = (): void => {
    const closed = now.levels.map((level) => (level.size === "*" ? { ...level, size: "2" } : level));
    edit({ ...now, levels: [...closed, { name: name!, size: "*" }] });
  };
  return [
    h(
      "fieldset",
      {},
      h("legend", {}, "From the inside; * is what is left"),
      sizeRow("host", now.devices, (devices) => {
        edit({ ...now, devices });
      }),
      ...rows,
    ),
    ...(now.devices && name
      ? [
          h(
            "button",
            {
              type: "button",
              class: "quiet",
              "data-key": "level",
              onclick: add,
            },
            `Add a level: ${name}`,
          ),
        ]
      : []),
  ];
}

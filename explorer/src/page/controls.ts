/** The left: sizes and order of the layout, devices a host and the levels around them. */
import { RECIPES } from "../formula/source";
import type { App } from "./app";
import { axesFields } from "./axes_form";
import { h, plural } from "./dom";
import { formOf, specOf, translated, type Form } from "./form";
import { GIVEN } from "./given";
import { machine } from "./machine_form";
import { recipeFields } from "./recipe_form";

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
          : [h("p", { class: "note" }, "Type a layout above.")]),
    ),
    h("section", {}, h("h2", {}, "Machine"), ...machine(app)),
    h("section", {}, h("h2", {}, "World"), h("p", { class: "note" }, worldText(app))),
  ];
}

function worldText({ model, error }: App): string {
  const { plan, cluster } = model;
  const use = model.communicators;
  const each = use.least === use.most ? `${use.least}` : `${use.least} to ${use.most}`;
  const hosts = cluster ? ` on ${plural(new Set(cluster.units[0].subarray(0, plan.worldSize)).size, "host")}` : "";
  const text = `${plural(plan.worldSize, "rank")}${hosts}. Communicators: ${each} a rank, ${use.total.toLocaleString("en")} in the job.`;
  return error ? `${text} This is the last valid layout.` : text;
}

function saved(app: App): Node[] {
  const axes = [...app.model.plan.mesh.sizes].map(([name, size]) => `${name}=${size}`).join(",");
  const edit = (): void => app.set({ spec: axes });
  return [
    h(
      "p",
      { class: "note" },
      `${app.given.title ?? "A saved plan"}: ${plural(app.model.plan.specs.length, "kind")} of group, as saved.`,
    ),
    h("button", { type: "button", "data-key": "edit", onclick: edit }, "Edit its axes"),
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
    h("span", {}, "Framework"),
    h(
      "select",
      { "data-key": "family", onchange: change },
      ...names.map((name) => h("option", { value: name, selected: name === chosen }, name)),
    ),
  );
}

const fields = (app: App, form: Form): Node[] =>
  form.type === "axes" ? axesFields(app, form) : recipeFields(app, form);

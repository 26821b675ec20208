/** The top: the SPEC, presets, comparison, copies, and the light. */
import type { App } from "./app";
import { megatronOf, pythonOf, specText } from "./copies";
import { h } from "./dom";
import { PRESETS } from "../formula/source";
import { RankmeshError } from "../formula/messages";
import { fragmentOf } from "./state";

/** Characters of a SPEC on one line, for browsers that do not size a field by its text. */
const ROW = 44;

export function header(app: App): Node[] {
  const { state } = app;
  return [
    h("h1", {}, "rankmesh ", h("span", {}, "explorer")),
    h(
      "div",
      { class: "specs" },
      specField(app, "spec", "Layout", state.spec, app.error),
      state.compare || comparing(app)
        ? specField(app, "compare", "Compare with", state.compare, app.compareError)
        : null,
    ),
    presets(app),
    h(
      "div",
      { class: "actions" },
      h(
        "button",
        {
          type: "button",
          "data-key": "compare",
          "aria-pressed": state.compare ? "true" : "false",
          onclick: () => toggleCompare(app),
        },
        state.compare ? "End comparison" : "Compare",
      ),
      copies(app),
      h(
        "button",
        {
          type: "button",
          "data-key": "theme",
          onclick: () => app.set({ theme: app.dark ? "light" : "dark" }),
        },
        app.dark ? "Light" : "Dark",
      ),
    ),
  ];
}

const comparing = (app: App): boolean => app.state.compare !== "";

function toggleCompare(app: App): void {
  app.set({ compare: app.state.compare ? "" : app.state.spec });
  document.querySelector<HTMLTextAreaElement>('[data-key="compare field"]')?.select();
}

function specField(
  app: App,
  name: "spec" | "compare",
  label: string,
  value: string,
  error: string | null,
): HTMLElement {
  // A text of several lines where the screen is narrow: a SPEC is seen whole.
  const input = h("textarea", {
    value,
    rows: Math.ceil((value.length + 1) / ROW),
    id: `${name}-field`,
    spellcheck: "false",
    autocomplete: "off",
    "data-key": `${name} field`,
    "aria-invalid": error ? "true" : null,
    "aria-describedby": error ? `${name}-error` : null,
    oninput: () => app.set({ [name]: input.value.replace(/\s*\n\s*/g, "") }),
    onkeydown: (event: KeyboardEvent) => {
      if (event.key === "Enter") event.preventDefault();
    },
  });
  return h(
    "div",
    { class: "spec" },
    h("label", { for: `${name}-field` }, label),
    input,
    error ? h("p", { class: "error", id: `${name}-error`, role: "alert" }, error) : null,
  );
}

function presets(app: App): HTMLElement {
  const choose = (event: Event): void => {
    const name = (event.target as HTMLSelectElement).value;
    const preset = PRESETS[name];
    if (preset)
      app.set({
        spec: name,
        world: null,
        cluster: `${preset.gpus_per_node}`,
        kind: "",
        pins: [],
        rank: null,
      });
  };
  const options = Object.entries(PRESETS).map(([name, preset]) =>
    h("option", { value: name, selected: name === app.state.spec }, `${name}: ${preset!.title}`),
  );
  return h(
    "label",
    { class: "inline preset" },
    "Preset",
    h(
      "select",
      { "data-key": "preset", onchange: choose },
      h("option", { value: "" }, "published layouts"),
      ...options,
    ),
  );
}

/** The menu of all that can be taken away. */
function copies(app: App): HTMLElement {
  const texts: [string, () => string][] = [
    ["Copy link", () => `${location.href.split("#")[0]}#${fragmentOf(app.state, app.start)}`],
    ["Copy as SPEC", () => specText(app.state.spec, app.state.world)],
    ["Copy as Python", () => pythonOf(app.state.spec, app.model.plan, app.given)],
    [
      "Copy as Megatron arguments",
      () => megatronOf(app.state.spec, app.model.plan, app.model.cluster?.devices[0] ?? 8),
    ],
  ];
  const menu = h(
    "details",
    { class: "menu" },
    h("summary", { "data-key": "copies" }, "Copy and save"),
    h(
      "div",
      {},
      ...texts.map(([label, text]) =>
        h(
          "button",
          {
            type: "button",
            onclick: () => {
              menu.open = false;
              show(label, text);
            },
          },
          label,
        ),
      ),
      h(
        "button",
        {
          type: "button",
          onclick: () => {
            menu.open = false;
            save(
              "layout.svg",
              new Blob([app.stage.view.svg(app.state.spec)], {
                type: "image/svg+xml",
              }),
            );
          },
        },
        "Save the picture as SVG",
      ),
      h(
        "button",
        {
          type: "button",
          onclick: () => {
            menu.open = false;
            void app.stage.view.png().then((png) => {
              if (png) save("layout.png", png);
            });
          },
        },
        "Save the picture as PNG",
      ),
      h(
        "button",
        {
          type: "button",
          onclick: () => {
            menu.open = false;
            print();
          },
        },
        "Print",
      ),
    ),
  );
  return menu;
}

/** The text in a dialog, copied where the browser allows it. */
function show(label: string, make: () => string): void {
  let [text, phrase] = ["", ""];
  try {
    text = make();
  } catch (error) {
    if (!(error instanceof RankmeshError)) throw error;
    phrase = error.message;
  }
  const written = h("p", { role: "status" }, phrase);
  const area = h("textarea", {
    readonly: true,
    rows: Math.min(12, text.split("\n").length + 1),
    "aria-label": label,
    value: text,
  });
  const dialog = h(
    "dialog",
    { "aria-label": label },
    h("h2", {}, label.replace("Copy", "To copy:").replace(": as ", ": ")),
    text ? area : null,
    written,
    h("form", { method: "dialog" }, h("button", { class: "primary" }, "Close")),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  if (!text) return;
  area.select();
  const clipboard = navigator.clipboard as Clipboard | undefined;
  clipboard?.writeText(text).then(
    () => (written.textContent = "Copied to the clipboard."),
    () => (written.textContent = "The text is selected: copy it with the keyboard."),
  );
}

function save(name: string, blob: Blob): void {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

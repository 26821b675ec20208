/** Above the drawing: drawing or tables, places or mesh, what the colours say, and the zoom. */
import type { App } from "./app";
import { h } from "./dom";
import { hangs } from "./given";
import type { Stage } from "./stage";
import { fragmentOf, type Overlay } from "./state";

export function bar(app: App, stage: Stage): (Node | null)[] {
  const { state, model } = app;
  const toggle = (text: string, pressed: boolean, change: () => void, title = ""): HTMLElement =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": pressed ? "true" : "false",
        "data-key": `bar ${text}`,
        onclick: change,
        title: title || null,
      },
      text,
    );
  const set = (change: Partial<App["state"]>) => () => app.set(change);
  const drawing = state.tab === "drawing";
  const kinds = h(
    "select",
    {
      "data-key": "kind",
      onchange: (event: Event) => app.set({ kind: (event.target as HTMLSelectElement).value }),
    },
    ...model.plan.specs.map((each) => h("option", { value: each.name, selected: each.name === app.kind }, each.name)),
  );
  const overlays: [Overlay, string][] = [["none", "groups"]];
  if (app.given.measured) overlays.push(["measured", "measured"]);
  if (hangs(app.given)) overlays.push(["hang", "hang"]);
  if (app.given.hang?.speed) overlays.push(["slow", "slow"]);
  return [
    h(
      "div",
      { class: "switch", role: "group", "aria-label": "What is shown" },
      toggle("Drawing", drawing, set({ tab: "drawing" })),
      toggle("Tables", !drawing, set({ tab: "table" })),
    ),
    drawing && model.cluster
      ? h(
          "div",
          {
            class: "switch",
            role: "group",
            "aria-label": "How ranks are arranged",
          },
          toggle("Hosts", state.arrange === "places", set({ arrange: "places" }), "ranks by host"),
          toggle("Mesh", state.arrange === "mesh", set({ arrange: "mesh" }), "ranks by axis"),
        )
      : null,
    overlays.length > 1 && drawing
      ? h(
          "div",
          {
            class: "switch",
            role: "group",
            "aria-label": "What the colours show",
          },
          ...overlays.map(([overlay, text]) => toggle(text, state.overlay === overlay, set({ overlay }))),
        )
      : null,
    h("label", { class: "inline" }, "Colour by", kinds),
    state.embed
      ? h(
          "a",
          {
            class: "open",
            target: "_blank",
            href: `#${fragmentOf({ ...state, embed: false }, app.start)}`,
          },
          "Open the explorer",
        )
      : null,
    drawing
      ? h(
          "div",
          { class: "zoom", role: "group", "aria-label": "Zoom" },
          ...(
            [
              ["−", "Zoom out", 1 / 1.5],
              ["+", "Zoom in", 1.5],
            ] as const
          ).map(([sign, label, factor]) =>
            h(
              "button",
              {
                type: "button",
                "aria-label": label,
                "data-key": label,
                onclick: () => {
                  stage.view.zoomBy(factor);
                  if (app.compared) stage.second.zoomBy(factor);
                },
              },
              sign,
            ),
          ),
          h(
            "button",
            {
              type: "button",
              "data-key": "fit",
              onclick: () => {
                stage.view.whole();
                stage.second.whole();
              },
            },
            "Fit",
          ),
        )
      : null,
  ];
}

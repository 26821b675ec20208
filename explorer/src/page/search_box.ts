/** Where a rank, a coordinate or a host is asked for. */
import type { App } from "./app";
import { h } from "./dom";
import { search } from "./find";

let searched = { text: "", label: "" };

export function searchBox(app: App): HTMLElement {
  const input = h("input", {
    type: "text",
    id: "search",
    placeholder: "13, tp=1,dp=3, node3",
    "data-key": "search",
    autocomplete: "off",
    value: searched.text,
    oninput: () => (searched = { ...searched, text: input.value }),
  });
  const go = (event: Event): void => {
    event.preventDefault();
    const { ranks, text: text } = search(app.model, input.value);
    searched = { text: input.value, label: text };
    app.hover = null;
    app.found = ranks.length > 1 ? ranks : [];
    app.set({ rank: ranks.length === 1 ? ranks[0] : null });
    if (ranks.length) app.stage.view.reveal(ranks[0]);
    app.announce(text);
  };
  return h(
    "form",
    { class: "search", role: "search", onsubmit: go },
    h("label", { for: "search" }, "Find ranks"),
    h("span", {}, input, h("button", { "data-key": "find" }, "Find")),
    searched.label ? h("p", { class: "note" }, searched.label) : null,
  );
}

/** One line of the controls: a label with a size, a switch or a text. */
import { int } from "../formula/axes";
import { h } from "./dom";
import { stepped } from "./form";

export const small = (
  sign: string,
  label: string,
  view: string | null,
  enabled: boolean,
  act: () => void,
): HTMLElement =>
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

/** A label, a size, buttons that halve and double it, and further ones. */
export function sizeRow(
  name: string,
  size: string,
  edit: (size: string) => void,
  label = name,
  inferred = "",
  ...further: readonly Node[]
): HTMLElement {
  const input = h("input", {
    type: "text",
    inputmode: "numeric",
    value: size,
    placeholder: inferred,
    "aria-label": label,
    "data-key": `size ${label}`,
    autocomplete: "off",
    oninput: () => edit(input.value.trim()),
    onkeydown: (event: KeyboardEvent) => {
      if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
      event.preventDefault();
      edit(`${Math.max(1, (int(size || inferred) ?? 1) + (event.key === "ArrowUp" ? 1 : -1))}`);
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
        onclick: () => edit(stepped(size || inferred, up)),
      },
      sign,
    );
  return h(
    "div",
    { class: "row" },
    h("span", { class: "name", "aria-hidden": "true" }, name),
    h("span", { class: "stepper" }, step("−", false), input, step("+", true), ...further),
  );
}

export const checkRow = (name: string, on: boolean, edit: (on: boolean) => void): HTMLElement =>
  h(
    "label",
    { class: "row" },
    h("span", { class: "name" }, name),
    h("input", {
      type: "checkbox",
      checked: on,
      "data-key": name,
      onchange: (event: Event) => edit((event.target as HTMLInputElement).checked),
    }),
  );

export const textRow = (name: string, value: string, placeholder: string, edit: (text: string) => void): HTMLElement =>
  h(
    "label",
    { class: "row" },
    h("span", { class: "name" }, name),
    h("input", {
      type: "text",
      value,
      placeholder,
      "data-key": name,
      oninput: (event: Event) => edit((event.target as HTMLInputElement).value.trim()),
    }),
  );

/** A card of the inspector, and what several of them hold. */
import { h, number } from "./dom";

export const card = (title: string, ...body: (Node | null)[]): HTMLElement =>
  h("section", { class: "card" }, h("h2", {}, title), ...body);
export const swatch = (colour: string): HTMLElement =>
  h("span", {
    class: "swatch",
    style: `background:${colour}`,
    "aria-hidden": "true",
  });

export const badge = (name: string, level: number): HTMLElement =>
  h("span", { class: level ? "badge crosses" : "badge", title: name }, name);
export const shortened = (ranks: readonly number[], size: number): string =>
  `${ranks.slice(0, 6).join(", ")}${size > 6 ? `, … ${number(size)} ranks` : ""}`;

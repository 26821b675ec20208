/** Elements in one expression: `h("button", { class: "icon", onclick: go }, "Go")`. */

type Child = Node | string | number | null | undefined | false;
type Listener = (event: never) => void;
export type Attributes = Readonly<Record<string, string | number | boolean | Listener | null | undefined>>;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: readonly (Child | readonly Child[])[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value as EventListener);
    else if (name === "value" && "value" in element) Object.assign(element, { value });
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(
    ...children
      .flat()
      .filter((child) => child !== null && child !== undefined && child !== false)
      .map(nodeOf),
  );
  return element;
}

const nodeOf = (child: Node | string | number): Node | string => (typeof child === "number" ? String(child) : child);

/** Replace what an element holds, and keep the focus on the control of the same key. */
export function fill(element: HTMLElement, ...children: readonly Child[]): void {
  const active = document.activeElement as HTMLElement | null;
  const key = active && element.contains(active) ? active.dataset.key : undefined;
  const caret = active && isText(active) ? active.selectionStart : null;
  element.replaceChildren(
    ...children.filter((child) => child !== null && child !== undefined && child !== false).map(nodeOf),
  );
  if (!key) return;
  const again = element.querySelector<HTMLElement>(`[data-key="${CSS.escape(key)}"]`);
  again?.focus({ preventScroll: true });
  if (again && isText(again) && caret !== null) again.setSelectionRange(caret, caret);
}

const isText = (element: HTMLElement): element is HTMLInputElement | HTMLTextAreaElement =>
  element instanceof HTMLTextAreaElement || (element instanceof HTMLInputElement && element.type === "text");

export const number = (value: number): string => value.toLocaleString("en");
export const plural = (count: number, token: string): string => `${number(count)} ${token}${count === 1 ? "" : "s"}`;

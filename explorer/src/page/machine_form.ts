/** The machine as controls: devices a host, and the levels around hosts. */
import type { App } from "./app";
import { h } from "./dom";
import { GIVEN } from "./given";
import { sizeRow, small } from "./rows";

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

export function machine(app: App): Node[] {
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
        "Change the machine",
      ),
    ];
  const now = machineOf(app.state.cluster);
  const edit = (next: Machine): void => app.set({ cluster: machineText(next) });
  const rows = now.levels.map((level, place) => {
    const resize = (size: string): void => {
      edit({
        ...now,
        levels: now.levels.map((each, other) => (other === place ? { ...each, size } : each)),
      });
    };
    const below = place ? now.levels[place - 1].name : "host";
    return sizeRow(
      level.name,
      level.size,
      resize,
      `${level.name} of ${below}s`,
      "",
      small("×", `remove ${level.name}`, "machine", true, () =>
        edit({
          ...now,
          levels: now.levels.filter((_, other) => other !== place),
        }),
      ),
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
      h("legend", {}, "Innermost level first; * is inferred"),
      sizeRow("host", now.devices, (devices) => edit({ ...now, devices })),
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

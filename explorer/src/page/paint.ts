/** Two surfaces with one set of strokes: a canvas on the screen, SVG for files and for paper. */

export interface TextStyle {
  readonly size: number;
  readonly fill: string;
  readonly align?: "start" | "middle" | "end";
  readonly bold?: boolean;
}

export interface Painter {
  rect(x: number, y: number, width: number, height: number, fill: string, radius?: number): void;
  frame(x: number, y: number, width: number, height: number, stroke: string, weight: number, radius?: number): void;
  text(x: number, y: number, text: string, style: TextStyle): void;
  path(d: string, stroke: string, weight: number, dashed?: boolean): void;
  area(d: string, fill: string): void;
}

export const FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
const ROUND = 3;

export class CanvasPainter implements Painter {
  #fill = "";
  #font = "";

  constructor(readonly context: CanvasRenderingContext2D) {}

  #filled(fill: string): void {
    if (fill === this.#fill) return;
    this.context.fillStyle = fill;
    this.#fill = fill;
  }

  rect(x: number, y: number, width: number, height: number, fill: string, radius = 0): void {
    this.#filled(fill);
    if (radius < ROUND) {
      this.context.fillRect(x, y, width, height);
      return;
    }
    this.context.beginPath();
    this.context.roundRect(x, y, width, height, radius);
    this.context.fill();
  }

  frame(x: number, y: number, width: number, height: number, stroke: string, weight: number, radius = 0): void {
    const { context } = this;
    context.strokeStyle = stroke;
    context.lineWidth = weight;
    context.setLineDash([]);
    if (radius < ROUND) {
      context.strokeRect(x, y, width, height);
      return;
    }
    context.beginPath();
    context.roundRect(x, y, width, height, radius);
    context.stroke();
  }

  text(x: number, y: number, text: string, { size, fill, align = "start", bold = false }: TextStyle): void {
    const { context } = this;
    const font = `${bold ? "600 " : ""}${size.toFixed(1)}px ${FONT}`;
    if (font !== this.#font) context.font = this.#font = font;
    this.#filled(fill);
    context.textAlign = align === "middle" ? "center" : align;
    context.textBaseline = "alphabetic";
    context.fillText(text, x, y);
  }

  path(d: string, stroke: string, weight: number, dashed = false): void {
    const { context } = this;
    context.strokeStyle = stroke;
    context.lineWidth = weight;
    context.lineCap = "round";
    context.setLineDash(dashed ? [weight * 2.5, weight * 2.5] : []);
    context.stroke(new Path2D(d));
  }

  area(d: string, fill: string): void {
    this.#filled(fill);
    this.context.fill(new Path2D(d));
  }
}

const round = (value: number): string => String(Math.round(value * 10) / 10);
const escaped = (text: string): string => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

export class SvgPainter implements Painter {
  #parts: string[] = [];

  rect(x: number, y: number, width: number, height: number, fill: string, radius = 0): void {
    this.#parts.push(`<rect ${box(x, y, width, height, radius)} fill="${fill}"/>`);
  }

  frame(x: number, y: number, width: number, height: number, stroke: string, weight: number, radius = 0): void {
    const look = `fill="none" stroke="${stroke}" stroke-width="${round(weight)}"`;
    this.#parts.push(`<rect ${box(x, y, width, height, radius)} ${look}/>`);
  }

  text(x: number, y: number, text: string, { size, fill, align = "start", bold = false }: TextStyle): void {
    const anchor = align === "start" ? "" : ` text-anchor="${align}"`;
    const weight = bold ? ' font-weight="600"' : "";
    this.#parts.push(
      `<text x="${round(x)}" y="${round(y)}" font-size="${round(size)}" fill="${fill}"${anchor}${weight}>${escaped(text)}</text>`,
    );
  }

  path(d: string, stroke: string, weight: number, dashed = false): void {
    const dash = dashed ? ` stroke-dasharray="${round(weight * 2.5)}"` : "";
    this.#parts.push(
      `<path d="${d}" fill="none" stroke="${stroke}" stroke-width="${round(weight)}" stroke-linecap="round"${dash}/>`,
    );
  }

  area(d: string, fill: string): void {
    this.#parts.push(`<path d="${d}" fill="${fill}"/>`);
  }

  /** The picture as a document of its own. */
  document(width: number, height: number, label: string): string {
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${round(width)} ${round(height)}" width="${round(width)}" ` +
      `height="${round(height)}" role="img" aria-label="${escaped(label).replaceAll('"', "&quot;")}" ` +
      `font-family="${FONT.replaceAll('"', "'")}">${this.#parts.join("\n")}</svg>`
    );
  }
}

const box = (x: number, y: number, width: number, height: number, radius: number): string =>
  `x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}"${radius >= ROUND ? ` rx="${round(radius)}"` : ""}`;

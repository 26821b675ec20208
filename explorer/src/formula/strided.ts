/**
 * Strided patterns: the arithmetic that every mesh and group is made of.
 *
 *     value(k) = Σ digit[i](k) · stride[i]      digits of k in the mixed radix of the sizes, first fastest
 */

/** (size, stride) of each digit, the first varying fastest. */
export type Pairs = readonly (readonly [number, number])[];

/** A dense block: each stride is the product of the sizes before it. */
export function dense(sizes: Iterable<number>): Pairs {
  let stride = 1;
  return [...sizes].map((size) => {
    const pair = [size, stride] as const;
    stride *= size;
    return pair;
  });
}

export const sizeOf = (pairs: Pairs): number => pairs.reduce((total, [size]) => total * size, 1);

/** The number at position `index`. */
export function valueAt(pairs: Pairs, index: number): number {
  let total = 0;
  for (const [size, stride] of pairs) {
    total += (index % size) * stride;
    index = Math.floor(index / size);
  }
  return total;
}

/** The digit of a number of the dense block along each pair. */
export const digitsOf = (pairs: Pairs, number: number): number[] =>
  pairs.map(([size, stride]) => Math.floor(number / stride) % size);

/** The position at which the pattern lists the number with these digits. */
export function positionOf(pairs: Pairs, digits: readonly number[]): number {
  let index = 0;
  let weight = 1;
  pairs.forEach(([size], place) => {
    index += digits[place] * weight;
    weight *= size;
  });
  return index;
}

/** All numbers in order. */
export function values(pairs: Pairs): Int32Array {
  const found = new Int32Array(sizeOf(pairs));
  let filled = 1;
  for (const [size, stride] of pairs) {
    for (let digit = 1; digit < size; digit++)
      for (let index = 0; index < filled; index++) found[digit * filled + index] = found[index] + digit * stride;
    filled *= size;
  }
  return found;
}

/** The shortest pattern that lists the same numbers in the same order. */
export function coalesced(pairs: Pairs): Pairs {
  const merged: [number, number][] = [];
  for (const [size, stride] of pairs) {
    const last = merged.at(-1);
    if (size === 1) continue;
    if (last && stride === last[0] * last[1]) last[0] *= size;
    else merged.push([size, stride]);
  }
  return merged;
}

/** Sizes and strides for people: `2x1, 4x8`. */
export const patternText = (pairs: Pairs): string =>
  pairs.map(([size, stride]) => `${size}x${stride}`).join(", ") || "1";

/** The pattern of the positions 0, stride, ... (width - 1) · stride; null where no pattern lists them all. */
export function between(members: Pairs, stride: number, width: number): Pairs | null {
  const pairs: [number, number][] = [];
  let seen = 1;
  for (const [size, step] of members) {
    const low = Math.max(seen, stride);
    const high = Math.min(seen * size, stride * width);
    if (low < high) {
      if (low % seen || high % low || (seen * size) % high) return null;
      pairs.push([high / low, step * (low / seen)]);
    }
    seen *= size;
  }
  return coalesced(pairs);
}

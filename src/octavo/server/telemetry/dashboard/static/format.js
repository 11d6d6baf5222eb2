// Formats numbers for people.

/** 1234.5 -> "1,235", 12.34 -> "12.3"; "–" for an unknown number. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
}

/** Seconds -> "850 µs", "12.3 ms", "1.25 s", "3 min 5 s". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toPrecision(3).replace(/\.0+$/, "")} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

/** Bytes -> "512 B", "1.25 MiB", "18.4 GiB". */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = Math.min(Math.floor(Math.log2(Math.max(value, 1)) / 10), units.length - 1);
  return `${unit ? (value / 1024 ** unit).toPrecision(3) : value} ${units[unit]}`;
}

/** 0.123 -> "12 %", with a digit more below ten. */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
}

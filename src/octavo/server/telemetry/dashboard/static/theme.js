// The theme (light or dark), which is the system's unless the user chose one, and the colours of drawings.

const KEY = "octavo-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];

function chosen() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be forbidden
  }
}

function apply() {
  document.documentElement.dataset.theme = chosen() ?? (system.matches ? "dark" : "light");
  for (const listener of listeners) listener();
}

/** Switch to the other theme, and store the choice. */
export function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // without storage the choice lasts until the page is reloaded
  }
  document.documentElement.dataset.theme = next;
  for (const listener of listeners) listener();
}

/** Call a function whenever the theme changes. */
export function onTheme(listener) {
  listeners.push(listener);
}

/** Return the value of a colour of style.css, like "line". */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Distinguishable for most people, on light and on dark.
const PALETTE = ["#4477cc", "#d9730d", "#2a9d6f", "#c2459b", "#8a6fd1", "#b08d00", "#2f9bb3", "#d1495b", "#6b8e23", "#a0663c"];

/** Return the colour of a request, by its number. */
export function requestColor(number) {
  return PALETTE[number % PALETTE.length];
}

system.addEventListener("change", apply);
apply();

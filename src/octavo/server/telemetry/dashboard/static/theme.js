// Light or dark: as the system has it, unless the reader chose; and the colours that pictures are drawn with.

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

/** Turn to the other theme, and keep to it. */
export function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // then it holds until the page is loaded again, by the line below
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

// Told apart by most eyes, on light and on dark.
const PALETTE = ["#4477cc", "#d9730d", "#2a9d6f", "#c2459b", "#8a6fd1", "#b08d00", "#2f9bb3", "#d1495b", "#6b8e23", "#a0663c"];

/** Return the colour of a request, by its number. */
export function requestColor(number) {
  return PALETTE[number % PALETTE.length];
}

system.addEventListener("change", apply);
apply();

// Shared by all drawings: sharp canvases, and a description of the point under the pointer.

/** Fit a canvas to its size on the page. Return its context, which is cleared and uses CSS pixels. */
export function prepare(canvas) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const hover = document.getElementById("hover");

/** Show the text of `tell(x, y)` for the point under the pointer, or no text if it is null. */
export function tellOnHover(canvas, tell) {
  canvas.addEventListener("pointermove", (event) => {
    const text = tell(event.offsetX, event.offsetY);
    hover.hidden = text === null;
    if (text === null) return;
    hover.textContent = text;
    const { offsetWidth, offsetHeight } = hover;
    hover.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - offsetWidth - 8), 4)}px`;
    hover.style.top = `${Math.max(Math.min(event.clientY + 14, innerHeight - offsetHeight - 8), 4)}px`;
  });
  canvas.addEventListener("pointerleave", () => {
    hover.hidden = true;
  });
}

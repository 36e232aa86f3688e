// Returns what a screen reader, or somebody who sees little, would miss on this page.
const found = [];
const named = (e) => (e.getAttribute("aria-label") || e.title || e.placeholder || e.textContent || e.alt || "").trim();

for (const e of document.querySelectorAll("a, button, summary")) if (!named(e) && !e.querySelector("img[alt]")) found.push(`no name: ${e.outerHTML}`);
for (const e of document.querySelectorAll("input:not([type=hidden])")) if (!e.labels.length && !e.getAttribute("aria-label")) found.push(`no label: ${e.outerHTML}`);
for (const e of document.querySelectorAll("img")) if (!e.hasAttribute("alt")) found.push(`no alt: ${e.outerHTML}`);
for (const e of document.querySelectorAll("svg, meter")) if (!e.getAttribute("aria-label") && !e.closest("td")) found.push(`no name: ${e.outerHTML.slice(0, 80)}`);
for (const e of document.querySelectorAll("th")) if (!e.scope) found.push(`no scope: ${e.outerHTML}`);
if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
if (document.querySelectorAll("main").length !== 1) found.push("not one main");
if (!document.documentElement.lang) found.push("no lang");
const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
if (new Set(ids).size !== ids.length) found.push("an id twice");

// Contrast of 4.5 to 1, by the formula of WCAG 2; backgrounds are opaque or those of an ancestor.
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const parse = (color) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const luminance = ([r, g, b]) => {
  const part = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const color = parse(getComputedStyle(e).backgroundColor);
    if (color[3] === 255) return color;
  }
  return [255, 255, 255, 255];
};
for (const e of document.querySelectorAll("main *, header *")) {
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.getClientRects().length) continue;
  const [a, b] = [luminance(parse(getComputedStyle(e).color)), luminance(ground(e))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(2)}: ${e.outerHTML.slice(0, 120)}`);
}
return found;

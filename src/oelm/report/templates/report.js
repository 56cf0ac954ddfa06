"use strict";
(() => {
  const root = document.documentElement;
  const THEME = "oelm-theme";
  const NARROW = 560;

  // A browser may refuse storage to files opened from disk; the choice then lasts as long as the page.
  function stored(value) {
    try {
      if (value === undefined) return localStorage.getItem(THEME);
      localStorage.setItem(THEME, value);
    } catch {
      return null;
    }
  }

  function setUpTheme() {
    const button = document.getElementById("theme");
    const system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
    const tell = () => button.setAttribute("aria-pressed", String(isDark()));
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      stored(root.dataset.theme);
      tell();
    });
    system.addEventListener("change", tell);
    tell();
  }

  // Numbers by size, then texts by alphabet; what is empty or not measured comes last, whichever way a column is sorted.
  const collator = new Intl.Collator(root.lang, { numeric: true });

  function key(cell) {
    const text = cell.dataset.sort ?? cell.textContent.trim();
    return { text, number: text === "" ? NaN : Number(text) };
  }

  function compare(one, other, sign) {
    const areNumbers = [one, other].map((value) => !Number.isNaN(value.number));
    if (areNumbers[0] !== areNumbers[1]) return areNumbers[0] ? -1 : 1;
    if (areNumbers[0]) return sign * (one.number - other.number || 0);
    return sign * collator.compare(one.text, other.text);
  }

  function sortBy(table, header, original) {
    const next = { none: "ascending", ascending: "descending", descending: "none" }[header.getAttribute("aria-sort")];
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", next);
    let rows = original;
    if (next !== "none") {
      const sign = next === "ascending" ? 1 : -1;
      const keyed = original.map((row) => [key(row.cells[header.cellIndex]), row]);
      rows = keyed.sort((one, other) => compare(one[0], other[0], sign)).map(([, row]) => row);
    }
    table.tBodies[0].append(...rows);
  }

  function setUpSorting(table) {
    const original = [...table.tBodies[0].rows];
    if (original.length < 2) return;
    for (const header of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-label", header.textContent.trim());
      header.append(button);
      header.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => sortBy(table, header, original));
    }
  }

  // A box that does not scroll is no place to stop at with the Tab key.
  function setUpScrolling() {
    for (const box of document.querySelectorAll(".scroll")) {
      const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
      box.tabIndex = scrolls ? 0 : -1;
    }
  }

  const isComposed = (spec) =>
    ["hconcat", "vconcat", "concat", "facet", "repeat"].some((key) => key in spec) ||
    ["row", "column", "facet"].some((key) => key in (spec.encoding ?? {}));

  // Axes and legends are part of the width. Vega-Lite, told so itself, warns wherever a height goes by steps.
  const FIT = [{ op: "add", path: "/autosize", value: { type: "fit-x", contains: "padding" } }];

  function scaled(spec, factor) {
    const result = { ...spec };
    const views = ["hconcat", "vconcat", "concat"].find((key) => key in spec);
    if (views) result[views] = spec[views].map((view) => scaled(view, factor));
    else if (spec.spec) result.spec = scaled(spec.spec, factor);
    else result.width = Math.max(80, Math.floor((typeof spec.width === "number" ? spec.width : 300) * factor));
    return result;
  }

  // Views that stand side by side stand below each other on a phone.
  function stacked(spec) {
    const { hconcat, ...rest } = spec;
    if (hconcat) return { ...rest, vconcat: hconcat };
    return spec.columns ? { ...spec, columns: 1 } : spec;
  }

  // What a chart says of its own legends and axes was meant for a wide page.
  function narrowed(part, width) {
    if (Array.isArray(part)) return part.map((inner) => narrowed(inner, width));
    if (part === null || typeof part !== "object") return part;
    const result = {};
    for (const [key, value] of Object.entries(part)) {
      const isData = ["data", "datasets", "values"].includes(key);
      result[key] = isData ? value : narrowed(value, width);
      if (value === null || typeof value !== "object") continue;
      if (key === "legend") Object.assign(result[key], { columns: 1, labelLimit: width - 60 });
      if (key === "axis" && value.labelLimit) result[key].labelLimit = Math.round(0.42 * width);
    }
    return result;
  }

  function themed(config, width) {
    if (width >= NARROW) return config;
    const legend = { ...config.legend, symbolDirection: "vertical", columns: 1, gradientLength: Math.min(200, width - 40) };
    const axis = { ...config.axis, labelLimit: Math.round(width / 3) };
    const axisX = { titleAnchor: "end", titleLimit: width - 30 }; // there is room to the left, below the other axis's labels
    return { ...config, legend, axis, axisX, title: { ...config.title, limit: width - 40 } };
  }

  const refuse = () => Promise.reject(new Error("a report loads nothing"));

  async function embed(place, spec, config) {
    place.vegaResult?.finalize();
    place.vegaResult = await vegaEmbed(place, spec, {
      mode: "vega-lite",
      patch: isComposed(spec) || typeof spec.width !== "number" ? [] : FIT,
      ast: true, // expressions are interpreted, so that the page needs no eval
      renderer: "svg", // follows the style sheet's colours when the theme changes
      actions: false,
      defaultStyle: false,
      tooltip: { disableDefaultStyle: true },
      loader: { load: refuse, sanitize: refuse },
      config,
    });
    return place.querySelector("svg").getBoundingClientRect().width;
  }

  async function draw(figure, width, config) {
    const place = figure.querySelector(".live");
    const defined = JSON.parse(figure.querySelector("script").textContent);
    const spec = width < NARROW ? narrowed(defined, width) : defined;
    const look = themed(config, width);
    const composed = isComposed(spec);
    const most = typeof spec.width === "number" ? Math.min(spec.width, width) : width;
    let attempt = composed && width < NARROW ? stacked(spec) : spec;
    if (!composed && typeof spec.width !== "object") attempt = { ...spec, width: most };
    figure.classList.add("drawn");
    let drawn = await embed(place, attempt, look);
    // Axes keep their size when views shrink, so that views composed of several need more than one go.
    for (let go = 0; drawn > width + 1 && go < 4; go++) {
      attempt = composed ? scaled(attempt, (0.97 * width) / drawn) : { ...spec, width };
      drawn = await embed(place, attempt, look);
    }
  }

  function setUpCharts() {
    const figures = [...document.querySelectorAll("figure.chart")].filter((figure) => figure.querySelector("script"));
    if (!figures.length) return;
    const config = JSON.parse(document.getElementById("chart-config").textContent);
    config.font = getComputedStyle(document.body).fontFamily;
    const near = new Set();
    const refresh = async (figure) => {
      const width = Math.floor(figure.querySelector(".picture").clientWidth);
      if (!width || figure.drawnWidth === width) return;
      figure.drawnWidth = width;
      try {
        await draw(figure, width, config);
      } catch (problem) {
        figure.classList.remove("drawn"); // the still picture stays
        console.error(problem);
      }
    };
    // Charts are drawn as the reader comes near; one without a still must be there when the page is printed.
    const watcher = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          near[isIntersecting ? "add" : "delete"](target);
          if (isIntersecting) refresh(target);
        }
      },
      { rootMargin: "800px" },
    );
    for (const figure of figures) watcher.observe(figure);
    for (const figure of figures) if (!figure.classList.contains("with-still")) refresh(figure);
    let timer;
    addEventListener("resize", () => {
      clearTimeout(timer);
      timer = setTimeout(() => near.forEach(refresh), 150);
    });
  }

  // Before the body is there, so that it never shows in the other theme first.
  if (["dark", "light"].includes(stored())) root.dataset.theme = stored();
  document.addEventListener("DOMContentLoaded", () => {
    setUpTheme();
    document.querySelectorAll("table").forEach(setUpSorting);
    setUpScrolling();
    addEventListener("resize", setUpScrolling);
    // A live page replaces a section by a newer one.
    document.addEventListener("replaced", (event) => {
      event.target.querySelectorAll("table").forEach(setUpSorting);
      setUpScrolling();
    });
    setUpCharts();
    // Beside the report there is room for its contents; paper shows everything.
    document.querySelector("nav details").open = matchMedia("(min-width: 100rem)").matches;
    addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));
  });
})();

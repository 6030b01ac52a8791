// Shows the open page in the side bar, and draws each Plotly figure when it comes near the screen, in the colours of the
// page; until then its static picture stands there.
(function () {
  const here = document.currentScript.src.replace(/site\.js.*/, "");
  let loading;
  const plotly = () => loading = loading || new Promise((done, failed) => {
    const s = document.createElement("script");
    s.src = here + "plotly.js"; s.onload = () => done(window.Plotly); s.onerror = failed;
    document.head.appendChild(s);
  });
  const dark = () => getComputedStyle(document.body).getPropertyValue("color-scheme").trim() === "dark" ||
    document.body.dataset.theme === "dark" || (document.body.dataset.theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  function coloured(layout, width) {
    const own = Object.assign({}, layout, { width: Math.min(layout.width || 700, width) });
    const title = typeof layout.title === "string" ? { text: layout.title } : layout.title;
    if (title && title.text)  // as large as fits
      own.title = Object.assign({}, title, { font: Object.assign({ size: Math.max(9, Math.min(17, 1.7 * own.width / title.text.length)) }, title.font) });
    if (!dark()) return own;
    Object.assign(own, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: Object.assign({}, layout.font, { color: "#ccc" }) });
    for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key))
      own[key] = Object.assign({}, layout[key], { gridcolor: "#444", zerolinecolor: "#666", linecolor: "#666" });
    for (const key of ["xaxis", "yaxis"]) own[key] = own[key] || { gridcolor: "#444", zerolinecolor: "#666" };
    return own;
  }
  async function draw(box) {
    const figure = JSON.parse(box.querySelector("script").textContent), Plotly = await plotly();
    let target = box.querySelector(".drawn");
    if (!target) { target = document.createElement("div"); target.className = "drawn"; box.appendChild(target); }
    await Plotly.react(target, figure.data, coloured(figure.layout, box.clientWidth),
      { displaylogo: false, displayModeBar: false, responsive: false });
    box.classList.add("alive");
  }
  addEventListener("DOMContentLoaded", () => {
    const bar = document.querySelector(".sidebar-scroll"), own = [...document.querySelectorAll(".sidebar-tree .current-page")].pop();
    const below = bar && own ? own.getBoundingClientRect().top - bar.getBoundingClientRect().top - bar.clientHeight / 2 : 0;
    if (below > 0) bar.scrollTo({ top: bar.scrollTop + below, behavior: "instant" });
    const boxes = [...document.querySelectorAll(".plotly-figure")];
    const near = new IntersectionObserver(seen => seen.filter(s => s.isIntersecting).forEach(s => { near.unobserve(s.target); draw(s.target); }),
      { rootMargin: "400px" });
    boxes.forEach(box => near.observe(box));
    const again = () => boxes.filter(box => box.classList.contains("alive")).forEach(draw);
    new MutationObserver(again).observe(document.body, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    let waits; addEventListener("resize", () => { clearTimeout(waits); waits = setTimeout(again, 200); });
  });
})();

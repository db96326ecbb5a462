
(function () {
  "use strict";
  var svg = document.documentElement, found = document.querySelector(".found");
  function boxes(within) { return Array.prototype.slice.call(within.querySelectorAll("g > g")); }
  function title(g) { return g.querySelector("title").textContent; }
  function number(e, name) { return parseFloat(e.getAttribute(name)); }
  boxes(svg).forEach(function (g) {
    var r = g.querySelector("rect");
    var label = g.querySelector("text");
    g.home = { x: number(r, "x"), w: number(r, "width"), label: label ? label.textContent : "" };
    g.addEventListener("click", function () { magnify(g); });
  });
  // The ranks of a title stay; what does not fit is left out of the path.
  function shorten(text, fits) {
    var m = /^(.*)@([^@]*)@([^@|]*)(\|[^@(]*) \(\d+ ranks?, /.exec(text);
    var ranks = m && "@" + m[3] + m[4];
    var tries = m ? [m[1] + "@" + m[2] + ranks, m[1] + "@" + m[2].replace(/^.*\//, "../") + ranks, m[1] + ranks,
                     m[1] + "@" + m[3]] : [text];
    for (var i = 0; i < tries.length; i++) { if (tries[i].length <= fits) { return tries[i]; } }
    return text.slice(0, fits - 2) + "..";
  }
  function magnify(to) {
    boxes(to.parentNode).forEach(function (g) {
      var r = g.querySelector("rect"), t = g.querySelector("text"), all = 1580, k = all / to.home.w;
      var x = Math.max(10, 10 + (g.home.x - to.home.x) * k);
      var end = Math.min(1590, 10 + (g.home.x + g.home.w - to.home.x) * k);
      var shown = end - x > 0.05;
      g.style.display = shown ? "" : "none";
      if (!shown) { return; }
      r.setAttribute("x", x);
      r.setAttribute("width", end - x);
      var fits = Math.floor((end - x) / 7.08), text = title(g);
      if (!t && fits >= 3) {
        t = document.createElementNS("http://www.w3.org/2000/svg", "text");
        t.setAttribute("y", number(r, "y") + 12);
        g.appendChild(t);
      }
      if (t) {
        t.setAttribute("x", x + 2);
        t.textContent = k === 1 ? g.home.label : fits < 3 ? "" : shorten(text, fits);
      }
    });
  }
  function search() {
    var word = window.prompt("Search functions, files and ranks (regular expression; empty: none)", "");
    if (word === null) { return; }
    var pattern;
    try { pattern = new RegExp(word, "i"); } catch (e) { found.textContent = String(e); return; }
    var n = 0;
    boxes(svg).forEach(function (g) {
      var hit = word !== "" && pattern.test(title(g));
      g.classList.toggle("m", hit);
      if (hit) { n++; }
    });
    found.textContent = word === "" ? "" : n + " functions match " + word;
  }
  window.addEventListener("keydown", function (e) {
    if (e.key === "F3" || (e.ctrlKey && e.key === "f")) { e.preventDefault(); search(); }
  });
})();

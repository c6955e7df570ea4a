"use strict";
/* Ask the server whether the run has news, and take the new page over where the old one is scrolled. */
setInterval(async () => {
  try {
    const old = document.getElementById("page");
    if (old.querySelector(".reset") || await (await fetch("stamp")).text() === old.dataset.stamp) return;
    const page = new DOMParser().parseFromString(await (await fetch("./")).text(), "text/html").getElementById("page");
    const opened = [...old.querySelectorAll("details")].map(node => node.open);
    old.replaceWith(page);
    page.querySelectorAll("details").forEach((node, index) => { node.open = Boolean(opened[index]); });
    prepare(page);
  } catch (error) { /* the server is gone: the page stays as it is */ }
}, 2000);

// Runs once for the pictures of the tab Look; their content is replaced, the element stays.
element.tabIndex = 0;
element.setAttribute("role", "group");
element.setAttribute("aria-label", "Pictures. The arrow keys move the token.");

function choose(y, x) {
  const inside = (value) => Math.min(Math.max(value, 0), 0.9999);
  trigger("select", { y: inside(y), x: inside(x) });
}

element.addEventListener("click", (event) => {
  const stack = event.target.closest(".stack");
  if (!stack || event.target.closest("a")) return;
  const box = stack.getBoundingClientRect();
  choose((event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width);
});

element.addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const board = element.querySelector(".board");
  if (!step || !board || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const { rows, columns } = board.dataset;
  const middle = (value, count) => (Math.floor(value * count) + 0.5) / count;  // of the token
  const y = middle(+board.dataset.y, +rows) + step[0] / rows;
  const x = middle(+board.dataset.x, +columns) + step[1] / columns;
  // keys may come faster than pictures: the next step starts from here
  if (y > 0 && y < 1) board.dataset.y = y;
  if (x > 0 && x < 1) board.dataset.x = x;
  choose(+board.dataset.y, +board.dataset.x);
});

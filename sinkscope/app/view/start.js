// How a view begins: in a page with its own data, in a live page, in a notebook.

/** Show a view in an element. */
export async function mount(root, answer, ask = null) {
  root.classList.add("sinkscope-view");
  const view = new View(root, ask);
  await view.show(answer);
  return view;
}

/** Begin in a page: with its own data, or with what the server answers. The first visit begins with the tour. */
export async function start(page) {
  const root = page.querySelector("#view");
  const data = JSON.parse(page.querySelector("#data").textContent);
  const first = !location.hash && !tourSeen();
  const view = data ? await mount(root, data) : await live(root);
  const touched = view && (view.variant !== "intact" || view.off.size > 0);
  if (view && first && !touched) tour(view);
}

async function live(root) {
  const ask = async (request) => {
    try {
      const answer = await fetch("view", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request) });
      return await answer.json();
    } catch {
      return { error: "The server does not answer. Start sinkscope view again." };
    }
  };
  const first = await ask({});
  if (first.error) return root.replaceChildren(element("p", { class: "error" }, first.error));
  return mount(root, first, ask);
}

/** A widget in a notebook: Python answers messages. */
export default {
  render({ model, el }) {
    const waiting = new Map();
    let number = 0;
    model.on("msg:custom", (message) => {
      waiting.get(message.number)(message.answer);
      waiting.delete(message.number);
    });
    const ask = (request) => new Promise((resolve) => {
      waiting.set(++number, resolve);
      model.send({ number, request });
    });
    const root = document.createElement("div");
    el.append(root);
    mount(root, model.get("view"), ask);
  },
};

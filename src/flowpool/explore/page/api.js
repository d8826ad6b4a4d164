// Questions to the server. While one is under way only the newest of those that follow is kept, so that a drag never queues.

const notice = document.getElementById("notice");
const SLOW = 1000; // milliseconds after which a wait is explained, and between two looks at what is waited for
let pending = 0;

function count(change) {
  pending += change;
  document.getElementById("main").setAttribute("aria-busy", pending > 0);
}

const post = (name, body) =>
  fetch(`api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

export async function ask(name, body = {}) {
  let response, answer;
  let over = false;
  count(1);
  const explain = setInterval(async () => {
    const { waiting } = await post("waiting", {}).then((given) => given.json()).catch(() => ({}));
    if (!over) say(waiting || "Computing …", true);
  }, SLOW);
  try {
    response = await post(name, body);
    answer = await response.json();
  } catch {
    throw new Error("The server does not answer. Is flowpool explore still running?");
  } finally {
    over = true;
    clearInterval(explain);
    count(-1);
  }
  if (!response.ok) throw new Error(answer.error);
  say("");
  return answer;
}

export function say(sentence, calm = false) {
  notice.hidden = !sentence;
  notice.textContent = sentence;
  notice.classList.toggle("calm", calm);
}

// A function that asks `name`; `show` gets the answer, the question and the milliseconds that the round trip took.
export function asker(name, show) {
  let waiting = null;
  let busy = false;

  return async function send(body) {
    waiting = body;
    if (busy) return;
    busy = true;
    while (waiting) {
      const asked = waiting;
      waiting = null;
      const begin = performance.now();
      try {
        show(await ask(name, asked), asked, performance.now() - begin);
      } catch (error) {
        say(error.message);
      }
    }
    busy = false;
  };
}

// Keeps the status page up to date, and sends the two turns of the try-it box.
//
// The server has filled the page once. From then on the same places (data-text, data-when, data-attr, data-each) are
// filled here from state.json: at each event of /capabilities/events, and every few seconds while somebody looks.
// Addresses are relative, so that the page also works below a prefix of a reverse proxy. Law: text, never markup.

const POLL_MS = 5000;
const REQUEST_LIMIT_MS = 8000;
const RETRY_MS = 3000;
const base = new URL('..', location.href).href.replace(/\/$/, '');
const byId = (id) => document.getElementById(id);

// Filling the page

const at = (values, path) => path.split('.').reduce((value, key) => value?.[key], values);

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function fill(element, values) {
  const { text, when, attr, each, address } = element.dataset;
  for (const pair of attr?.split(' ') ?? []) {
    const [name, path] = pair.split(':');
    const value = String(at(values, path) ?? '');
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  }
  if (when !== undefined) element.hidden = !at(values, when);
  if (each !== undefined) {
    fillEach(element, values, ...each.split(':'));
  } else if (text !== undefined) {
    const ownAddress = address !== undefined && values.page.hasRelay;
    say(element, ownAddress ? base : String(at(values, text) ?? element.dataset.empty ?? ''));
    if (element.tagName === 'TIME') tellTime(element);
  } else {
    for (const child of element.children) fill(child, values);
  }
}

function fillEach(list, values, path, template) {
  const items = at(values, path);
  while (list.children.length > items.length) list.lastElementChild.remove();
  while (list.children.length < items.length) list.append(byId(template).content.firstElementChild.cloneNode(true));
  items.forEach((item, index) => fill(list.children[index], item));
}

function tellTime(element) {
  const iso = element.getAttribute('datetime');
  if (!iso) return;
  const moment = new Date(iso);
  const seconds = Math.max(0, Math.round((Date.now() - moment) / 1000));
  element.title = moment.toLocaleString();
  if (seconds < 5) say(element, 'just now');
  else if (seconds < 90) say(element, `${seconds - (seconds % 5)} s ago`);
  else if (seconds < 5400) say(element, `${Math.round(seconds / 60)} min ago`);
  else say(element, moment.toLocaleString([], { dateStyle: 'medium', timeStyle: 'short' }));
}

// Staying up to date

let state = null;
let heardAt = new Date();
let asking = null;
let pollTimer = 0;

function show(values) {
  fill(document.documentElement, values);
}

async function ask() {
  const answer = await fetch('state.json', { cache: 'no-store', signal: AbortSignal.timeout(REQUEST_LIMIT_MS) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

async function refresh() {
  asking ??= ask().finally(() => { asking = null; });
  try {
    state = await asking;
    heardAt = new Date();
    show(state);
  } catch {
    showLost();
  }
}

function showLost() {
  const sentence = `The sidecar does not answer; this page tries again. What stands below is from ${heardAt.toLocaleTimeString()}.`;
  const lost = { word: 'lost', title: 'No contact', sentence, document: 'No contact · hermes-sidecar' };
  if (state) {
    show({ ...state, status: { ...state.status, ...lost } });
  } else {
    document.documentElement.dataset.status = lost.word;
    say(document.querySelector('.word'), lost.title);
    say(document.querySelector('.sentence'), sentence);
  }
}

function poll() {
  clearTimeout(pollTimer);
  if (document.visibilityState === 'visible') refresh().finally(planNext);
}

function planNext() {
  if (document.visibilityState === 'visible') pollTimer = setTimeout(poll, POLL_MS);
}

function listen() {
  const events = new EventSource('../capabilities/events');
  const live = byId('live');
  live.hidden = false;
  events.onopen = () => { live.dataset.state = 'on'; say(live, '· live'); };
  events.onmessage = refresh;
  events.onerror = () => {
    live.dataset.state = 'off';
    say(live, '· live updates lost, connecting again');
    refresh();
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, RETRY_MS);
  };
}

byId('probe').form.addEventListener('submit', async (event) => {
  event.preventDefault();
  const button = byId('probe');
  if (button.ariaDisabled === 'true') return;
  button.ariaDisabled = 'true';
  say(byId('probe-said'), 'Asking the gateway …');
  try {
    const answer = await fetch('../capabilities/refresh', { method: 'POST' });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    await refresh();
    say(byId('probe-said'), 'Probed. What you see is how it is now.');
  } catch {
    say(byId('probe-said'), 'The sidecar did not answer.');
  } finally {
    button.ariaDisabled = 'false';
  }
});

// Try it

let running = null;

function fresh(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(5));
  return prefix + Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('');
}

class TurnFailed extends Error {}

async function firstModel(headers, signal) {
  try {
    const answer = await fetch('../v1/models', { headers, signal, redirect: 'error' });
    return (await answer.json()).data[0].id;
  } catch (failure) {
    if (signal.aborted) throw failure;
    return 'hermes-agent';
  }
}

async function* words(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n|\r/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data:')) continue;
      const data = line.slice(5).trim();
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new TurnFailed(`The gateway took the turn, but failed: ${chunk.error.message ?? 'no reason given'}`);
      const word = chunk.choices?.[0]?.delta?.content;
      if (word) yield word;
    }
  }
}

async function refusal(answer) {
  const { error } = await answer.json().catch(() => ({}));
  const origin = answer.headers.get('X-Hermes-Sidecar-Error') ? 'The sidecar' : 'The gateway';
  const said = error?.message ? `: ${error.message}` : '.';
  const hint = error?.hint ? ` ${error.hint}` : '';
  return `${origin} refused the turn with status ${answer.status}${said}${hint}`;
}

async function turn(body, headers, signal, place) {
  const answer = await fetch('../v1/chat/completions', {
    method: 'POST', headers, body: JSON.stringify(body), signal, redirect: 'error',
  });
  if (!answer.ok) throw new TurnFailed(await refusal(answer));
  if (answer.headers.get('Content-Type')?.startsWith('text/event-stream')) {
    for await (const word of words(answer)) place.append(word);
  } else {
    place.append((await answer.json()).choices?.[0]?.message?.content ?? '');
  }
  return {
    session: answer.headers.get('X-Hermes-Session-Id'),
    source: answer.headers.get('X-Hermes-Sidecar-Session'),
    text: place.textContent,
  };
}

function placeFor(asked) {
  const item = byId('turn').content.firstElementChild.cloneNode(true);
  say(item.querySelector('.asked'), asked);
  byId('turns').append(item);
  return item.querySelector('.answer-text');
}

function verdictOf(first, second, token) {
  const recalled = second.text.includes(token);
  if (first.session && first.session === second.session && !first.session.startsWith('api-')) {
    return [true, recalled
      ? 'It holds together: both turns landed in one session, and the second answer knew the word of the first.'
      : 'Both turns landed in one session. The second answer did not repeat the word, which is up to the model.'];
  }
  if (!first.session && !second.session) {
    return [recalled, recalled
      ? 'It holds together: the backend names no session, but the second answer knew the word of the first.'
      : 'This backend names no session and did not remember. Frontends that send the whole history with each turn work all the same.'];
  }
  if (first.session?.startsWith('api-')) {
    return [false, 'The gateway made up a session of its own instead of taking the one that was sent. It may want its key with session headers, or be too old for them.'];
  }
  return [false, 'The turns landed in two sessions. The gateway does not keep to the id that it is sent.'];
}

const inShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const asciiJson = (value) =>
  JSON.stringify(value).replace(/[^\x20-\x7e]/g, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`);

function curlLine(key, body) {
  const authorization = byId('token').value.trim() ? ' -H "Authorization: Bearer $TOKEN"' : '';
  return `curl -N ${base}/v1/chat/completions${authorization} \\\n  -H 'Content-Type: application/json' -H 'X-Hermes-Session-Key: ${key}' \\\n  -d ${inShell(asciiJson(body))}`;
}

function plan(model) {
  const key = fresh('try-');
  const token = fresh('token-');
  const asked = [`Please remember this token: ${token}. Answer in one short sentence.`, 'Which token did I ask you to remember?'];
  const bodies = asked.map((content) => ({ model, stream: true, messages: [{ role: 'user', content }] }));
  return { key, token, asked, bodies };
}

function showCurl({ key, bodies }) {
  say(byId('curl'), bodies.map((body) => curlLine(key, body)).join('\n\n'));
}

function setRunning(controller) {
  running = controller;
  byId('try-send').ariaDisabled = String(controller !== null);
  byId('try-stop').hidden = controller === null;
}

function judge(isGood, sentence) {
  byId('verdict').dataset.good = String(isGood);
  say(byId('verdict'), sentence);
}

async function tryIt() {
  setRunning(new AbortController());
  const { signal } = running;
  byId('turns').replaceChildren();
  byId('told').hidden = true;
  byId('verdict').dataset.good = '';
  say(byId('verdict'), 'Sending …');
  const bearer = byId('token').value.trim();
  const headers = bearer ? { Authorization: `Bearer ${bearer}` } : {};
  try {
    const planned = plan(byId('model').value.trim() || await firstModel(headers, signal));
    showCurl(planned);
    const chatHeaders = { ...headers, 'Content-Type': 'application/json', 'X-Hermes-Session-Key': planned.key };
    const told = [];
    for (const [index, body] of planned.bodies.entries()) {
      told.push(await turn(body, chatHeaders, signal, placeFor(planned.asked[index])));
    }
    const [first, second] = told;
    say(byId('told-key'), planned.key);
    say(byId('told-first'), first.session ?? 'not named');
    say(byId('told-second'), second.session ?? 'not named');
    say(byId('told-source'), second.source ?? 'not there');
    byId('told').hidden = false;
    judge(...verdictOf(first, second, planned.token));
  } catch (failure) {
    if (signal.aborted) judge(false, 'Stopped.');
    else if (failure instanceof TurnFailed) judge(false, failure.message);
    else judge(false, 'The answer broke off, or was not a chat answer. The gateway\u2019s log may say why.');
  } finally {
    setRunning(null);
    refresh();
  }
}

byId('try-form').addEventListener('submit', (event) => {
  event.preventDefault();
  if (running === null) tryIt();
});
byId('try-stop').addEventListener('click', () => running?.abort());
byId('try-inner').hidden = false;
showCurl(plan('hermes-agent'));

// Copying

function addCopyButton(box) {
  const button = document.createElement('button');
  button.type = 'button';
  button.className = 'copy plain';
  button.textContent = 'Copy';
  const code = box.querySelector('pre');
  button.addEventListener('click', async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      say(button, 'Copied');
    } catch { // there is a clipboard only on https and on this machine
      getSelection().selectAllChildren(code);
      say(button, 'Selected: press Ctrl+C');
    }
    setTimeout(() => say(button, 'Copy'), 2500);
  });
  box.append(button);
}

document.querySelectorAll('.code').forEach(addCopyButton);

document.querySelectorAll('time[datetime]').forEach(tellTime);
document.addEventListener('visibilitychange', poll);
poll();
listen();

// A chat application for Node, written with the library that its argument names: `openai` or `ai`.
//
// A job comes in as a line of JSON, and what its user would see goes out as lines: {piece}, {tool}, {complaint}, and at last {end}.
// The line "leave" is the user's Stop button. Packages are looked for where it is started.
import { createInterface } from 'node:readline';
import { inspect } from 'node:util';

const MODEL = 'hermes-agent';

async function openaiSdk() {
  const { default: OpenAI } = await import('openai');
  return async function* (job, signal) {
    const client = new OpenAI({ baseURL: job.url, apiKey: job.key, maxRetries: 0 });
    const text = { type: 'text', text: job.prompt };
    const content = job.image ? [text, { type: 'image_url', image_url: { url: job.image } }] : job.prompt;
    const answer = await client.chat.completions.create(
      {
        model: MODEL,
        stream: job.stream,
        messages: [{ role: 'user', content }],
        ...(job.tool && { tools: [{ type: 'function', function: job.tool }] }),
      },
      { signal, headers: { 'X-Hermes-Session-Key': job.session } },
    );
    if (!job.stream) {
      const { message } = answer.choices[0];
      if (message.content) yield { piece: message.content };
      for (const call of message.tool_calls ?? []) yield { tool: call.function };
      return;
    }
    const tool = { name: '', arguments: '' };
    for await (const chunk of answer) {
      // The agent also sends events of its own, about its work; here they are chunks without `choices`.
      for (const { delta } of chunk.choices ?? []) {
        if (delta.content) yield { piece: delta.content };
        for (const call of delta.tool_calls ?? []) {
          tool.name += call.function.name ?? '';
          tool.arguments += call.function.arguments ?? '';
        }
      }
    }
    signal.throwIfAborted(); // the library ends an aborted stream as if it were complete
    if (tool.name) yield { tool };
  };
}

async function aiSdk() {
  const { createOpenAICompatible } = await import('@ai-sdk/openai-compatible');
  const { generateText, jsonSchema, streamText, tool } = await import('ai');
  return async function* (job, abortSignal) {
    const hermes = createOpenAICompatible({ name: 'hermes', baseURL: job.url, apiKey: job.key });
    const text = { type: 'text', text: job.prompt };
    const content = job.image ? [text, { type: 'image', image: job.image }] : job.prompt;
    const made = job.tool && {
      [job.tool.name]: tool({ description: job.tool.description, inputSchema: jsonSchema(job.tool.parameters) }),
    };
    const request = {
      model: hermes(MODEL),
      messages: [{ role: 'user', content }],
      headers: { 'X-Hermes-Session-Key': job.session },
      maxRetries: 0,
      abortSignal,
      ...(made && { tools: made }),
    };
    if (!job.stream) {
      const answer = await generateText(request);
      if (answer.text) yield { piece: answer.text };
      for (const call of answer.toolCalls) {
        yield { tool: { name: call.toolName, arguments: JSON.stringify(call.input) } };
      }
      return;
    }
    for await (const part of streamText({ ...request, onError() {} }).fullStream) {
      if (part.type === 'text-delta') yield { piece: part.text };
      if (part.type === 'tool-call') yield { tool: { name: part.toolName, arguments: JSON.stringify(part.input) } };
      if (part.type === 'error') {
        // A chunk that it does not know is an error to it, after which it goes on with the answer.
        if (part.error.name !== 'AI_TypeValidationError') throw part.error;
        yield { complaint: part.error.name };
      }
    }
    abortSignal.throwIfAborted();
  };
}

const tell = (seen) => process.stdout.write(`${JSON.stringify(seen)}\n`);

async function work(ask, job, signal) {
  try {
    for await (const seen of ask(job, signal)) tell(seen);
    tell({ end: 'complete' });
  } catch (error) {
    if (signal.aborted) tell({ end: 'left' });
    else {
      const status = error.status ?? error.statusCode ?? null;
      // As Node prints an error that nobody caught.
      tell({ end: 'error', kind: error.name === 'Error' ? error.constructor.name : error.name, status, text: inspect(error) });
    }
  }
}

const ask = await { openai: openaiSdk, ai: aiSdk }[process.argv.at(-1)]();
let stop = new AbortController();
tell({ ready: true });
for await (const line of createInterface({ input: process.stdin })) {
  const order = JSON.parse(line);
  if (order === 'leave') stop.abort();
  else {
    stop = new AbortController();
    work(ask, order, stop.signal);
  }
}

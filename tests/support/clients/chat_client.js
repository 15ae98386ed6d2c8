// A chat application as a page's own script, with fetch alone: order(job), then next() for each thing that its user
// would see, {piece}, {tool}, and at last {end}; order('leave') is the Stop button.
{
  const seen = [];
  let wake = () => {};
  let stop;

  const tell = (thing) => {
    seen.push(thing);
    wake();
  };

  async function* events(body) {
    let text = '';
    for await (const piece of body.pipeThrough(new TextDecoderStream())) {
      text += piece;
      const blocks = text.split('\n\n');
      text = blocks.pop();
      for (const block of blocks) {
        const data = /^data: (.*)$/m.exec(block);
        if (data && !block.startsWith('event:') && data[1] !== '[DONE]') yield JSON.parse(data[1]);
      }
    }
  }

  async function work(job, signal) {
    const text = { type: 'text', text: job.prompt };
    const content = job.image ? [text, { type: 'image_url', image_url: { url: job.image } }] : job.prompt;
    const answer = await fetch(`${job.url}/chat/completions`, {
      method: 'POST',
      signal,
      headers: {
        Authorization: `Bearer ${job.key}`,
        'Content-Type': 'application/json',
        'X-Hermes-Session-Key': job.session,
      },
      body: JSON.stringify({
        model: 'hermes-agent',
        stream: job.stream,
        messages: [{ role: 'user', content }],
        ...(job.tool && { tools: [{ type: 'function', function: job.tool }] }),
      }),
    });
    if (!answer.ok) {
      const { error } = await answer.json();
      return { end: 'error', kind: answer.statusText, status: answer.status, text: `${error.message} ${error.hint ?? ''}` };
    }
    const tool = { name: '', arguments: '' };
    const read = (message) => {
      if (message.content) tell({ piece: message.content });
      for (const call of message.tool_calls ?? []) {
        tool.name += call.function.name ?? '';
        tool.arguments += call.function.arguments ?? '';
      }
    };
    if (job.stream) {
      for await (const chunk of events(answer.body)) for (const choice of chunk.choices) read(choice.delta);
    } else read((await answer.json()).choices[0].message);
    if (tool.name) tell({ tool });
    return { end: 'complete' };
  }

  window.order = (what) => {
    if (what === 'leave') return stop.abort();
    stop = new AbortController();
    const { signal } = stop;
    work(what, signal)
      .catch((error) =>
        signal.aborted ? { end: 'left' } : { end: 'error', kind: error.name, status: null, text: error.message },
      )
      .then(tell);
  };
  window.next = async () => {
    if (!seen.length) await new Promise((resolve) => (wake = resolve));
    return seen.shift();
  };
}

// Asks a router with @grpc/grpc-js and prints what it found; an HTTP/2 implementation of its own.
// argv: folder of the packages, folder of the .proto files, address, question.
const [packages, protos, address, question] = process.argv.slice(2);
const grpc = require(`${packages}/node_modules/@grpc/grpc-js`);
const loader = require(`${packages}/node_modules/@grpc/proto-loader`);

const options = { includeDirs: [protos], defaults: true, enums: String, longs: Number, keepCase: true };
const definition = loader.loadSync("effuse/v1/generation.proto", options);
const { GenerationService } = grpc.loadPackageDefinition(definition).effuse.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());
const deadline = () => new Date(Date.now() + 60_000);

function unary(request) {
  return new Promise((resolve) => {
    const found = {};
    const call = client.Generate(request, { deadline: deadline() }, (error, answer) => {
      Object.assign(found, error ? { code: error.code, details: error.details } : answer);
      if (error) found.has_status = error.metadata.get("grpc-status-details-bin").length > 0;
    });
    call.on("status", (status) => {
      found.named = status.metadata.get("x-request-id")[0];
      setImmediate(() => resolve(found));
    });
  });
}

function stream(request, cancelAfterFirst) {
  return new Promise((resolve) => {
    const found = { texts: [], reason: null, code: 0 };
    const call = client.GenerateStream({ request }, { deadline: deadline() });
    call.on("data", (event) => {
      if (event.commit) found.texts.push(event.commit.text);
      if (event.finished) found.reason = event.finished.finish_reason;
      if (cancelAfterFirst) call.cancel();
    });
    call.on("error", () => {});
    call.on("status", (status) => resolve(Object.assign(found, { code: status.code })));
  });
}

async function main() {
  const long = { prompt: question, stopping: { max_tokens: 400, ignore_eos: true } };
  const found = {
    whole: await unary({ prompt: question, request_id: "js-1" }),
    bad: await unary({ prompt: question, stopping: { max_tokens: 0 } }),
    streamed: await stream({ prompt: question }, false),
    cancelled: await stream(long, true),
  };
  console.log(JSON.stringify(found));
  client.close();
}

main();

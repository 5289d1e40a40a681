// Calls a router with grpc-go and stubs of its own generators, and prints the results.
// Arguments: address, question.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	effusev1 "effuse/v1"
)

type found map[string]any

func main() {
	connection, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(err)
	client := effusev1.NewGenerationServiceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	question := &effusev1.GenerateRequest{Input: &effusev1.GenerateRequest_Prompt{Prompt: os.Args[2]}}
	told := found{"whole": unary(ctx, client, question), "streamed": stream(ctx, client, question)}
	bad := proto.Clone(question).(*effusev1.GenerateRequest)
	bad.Stopping = &effusev1.StoppingParams{MaxTokens: proto.Uint32(0)}
	told["bad"] = failure(ctx, client, bad)
	short, end := context.WithTimeout(ctx, time.Millisecond)
	defer end()
	long := proto.Clone(question).(*effusev1.GenerateRequest)
	long.Stopping = &effusev1.StoppingParams{MaxTokens: proto.Uint32(400), IgnoreEos: proto.Bool(true)}
	_, err = client.Generate(short, long)
	told["late"] = status.Code(err).String()
	check(json.NewEncoder(os.Stdout).Encode(told))
}

func unary(ctx context.Context, client effusev1.GenerationServiceClient, request *effusev1.GenerateRequest) found {
	var trailer metadata.MD
	answer, err := client.Generate(ctx, request, grpc.Trailer(&trailer))
	check(err)
	return found{
		"text":     answer.Text,
		"reason":   answer.FinishReason.String(),
		"duration": answer.Stats.TotalDuration.AsDuration().Seconds(),
		"id":       answer.RequestId,
		"named":    trailer.Get("x-request-id"),
	}
}

func stream(ctx context.Context, client effusev1.GenerationServiceClient, request *effusev1.GenerateRequest) found {
	events, err := client.GenerateStream(ctx, &effusev1.GenerateStreamRequest{Request: request})
	check(err)
	text, reason := "", ""
	for {
		event, err := events.Recv()
		if err == io.EOF {
			return found{"text": text, "reason": reason}
		}
		check(err)
		text += event.GetCommit().GetText()
		reason = event.GetFinished().GetFinishReason().String()
	}
}

func failure(ctx context.Context, client effusev1.GenerationServiceClient, request *effusev1.GenerateRequest) found {
	_, err := client.Generate(ctx, request)
	told := found{"code": status.Code(err).String()}
	for _, detail := range status.Convert(err).Details() {
		switch one := detail.(type) {
		case *errdetails.ErrorInfo:
			told["reason"], told["domain"] = one.Reason, one.Domain
		case *errdetails.BadRequest:
			told["field"] = one.FieldViolations[0].Field
		}
	}
	return told
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

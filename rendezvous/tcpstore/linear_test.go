package tcpstore

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// question is a request of a client about one key.
type question struct{ op, key, value, expected string }

// lost is the answer to a request whose connection was cut: it may count or not.
const lost = "\x00lost"

// value is the model of one key, and absent that of one that is not there.
type value string

const absent value = "\x00absent"

// after are the values that a key may have after a question and its answer.
func (v value) after(q question, answer string) []any {
	next, says := v, ""
	switch q.op {
	case "set":
		next = value(q.value)
	case "append":
		next = value(strings.TrimPrefix(string(v), string(absent)) + q.value)
	case "add":
		n, _ := strconv.Atoi(strings.TrimPrefix(string(v), string(absent)))
		says = strconv.Itoa(n + 1)
		next = value(says)
	case "delete":
		next, says = absent, strconv.FormatBool(v != absent)
	case "check":
		says = strconv.FormatBool(v != absent)
	case "compare_set":
		if string(v) == q.expected || v == absent && q.expected == "" {
			next = value(q.value)
		}
		if says = string(next); next == absent {
			says = q.expected
		}
	case "get": // a wait and a get: another client may delete the key between them, which then is empty
		says = strings.TrimPrefix(string(v), string(absent))
	case "wait":
		if v == absent {
			return nil
		}
	}
	switch answer {
	case lost:
		return []any{v, next}
	case says:
		return []any{next}
	}
	return nil
}

var keys = porcupine.NondeterministicModel{
	Partition: func(all []porcupine.Operation) (parts [][]porcupine.Operation) {
		byKey := map[string][]porcupine.Operation{}
		for _, op := range all {
			byKey[op.Input.(question).key] = append(byKey[op.Input.(question).key], op)
		}
		for _, ops := range byKey {
			parts = append(parts, ops)
		}
		return parts
	},
	Init: func() []any { return []any{absent} },
	Step: func(state, input, output any) []any {
		return state.(value).after(input.(question), output.(string))
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%v: %v", input, output) },
}

// monotonic is the clock that Python's time.monotonic_ns has as well.
func monotonic() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return t.Nano()
}

// TestLinearizable: what PyTorch's clients, and ours of the newer generation whose connections are cut now and then,
// are told at the same time is as if they had asked one after the other.
func TestLinearizable(t *testing.T) {
	for _, p := range pythons() {
		t.Run(p.name, func(t *testing.T) {
			p.require(t)
			_, addr := start(t, Config{})
			host, port := hostPort(t, addr)
			printed, over := make(chan string, 1), make(chan struct{})
			go func() {
				defer close(over)
				printed <- p.script(t, nil, "testdata/linear.py", host, port)
			}()
			var mu sync.Mutex
			var ops []porcupine.Operation
			var clients sync.WaitGroup
			for i := range 3 {
				clients.Go(func() {
					for _, op := range asks(t, addr, 4+i, over) {
						mu.Lock()
						ops = append(ops, op)
						mu.Unlock()
					}
				})
			}
			clients.Wait()
			ops = answered(append(ops, ofPython(t, <-printed)...))
			result, info := porcupine.CheckOperationsVerbose(keys.ToModel(), ops, time.Minute)
			if result == porcupine.Illegal {
				t.Logf("%d partial orders of %+v", len(info.PartialLinearizations()), ops)
			}
			require.Equal(t, porcupine.Ok, result, "of %d requests", len(ops))
		})
	}
}

// answered are the requests by when they are known to count: set and append have no answer, but precede the next one of
// their client that has. Where its connection breaks before, they may count or not.
func answered(all []porcupine.Operation) (ops []porcupine.Operation) {
	next := map[int]int64{} // by client: when it next heard an answer
	for _, op := range slices.Backward(all) {
		q := op.Input.(question)
		switch mute := q.op == "set" || q.op == "append"; {
		case q.op == "broken":
			next[op.ClientId] = 0
			continue
		case op.Output == lost:
			next[op.ClientId] = 0
		case mute && next[op.ClientId] == 0:
			op.Output, op.Return = lost, math.MaxInt64
		case mute:
			op.Return = next[op.ClientId]
		default:
			next[op.ClientId] = op.Return
		}
		ops = append(ops, op)
	}
	return ops
}

// ofPython reads what testdata/linear.py has written.
func ofPython(t *testing.T, printed string) (ops []porcupine.Operation) {
	for line := range strings.Lines(printed) {
		var op porcupine.Operation
		var q question
		var answer string
		fields := []any{&op.ClientId, &q.op, &q.key, &q.value, &q.expected, &answer, &op.Call, &op.Return}
		require.NoError(t, json.Unmarshal([]byte(line), &fields), line)
		op.Input, op.Output = q, answer
		ops = append(ops, op)
	}
	require.Greater(t, len(ops), 50)
	return ops
}

// asks has a client ask until over, a few hundred times at most.
func asks(t *testing.T, addr string, client int, over <-chan struct{}) (ops []porcupine.Operation) {
	var c *Client
	for n := range 400 {
		select {
		case <-over:
			n = 400
		case <-time.After(time.Duration(rand.IntN(8)) * time.Millisecond):
		}
		if n == 400 {
			break
		}
		if c == nil {
			c = dial(t, addr)
		}
		q := question{op: []string{"set", "append", "compare_set", "delete", "check"}[rand.IntN(5)],
			key: []string{"/a", "/b"}[rand.IntN(2)], value: fmt.Sprint(client, ".", n)}
		if rand.IntN(3) == 0 {
			q = question{op: []string{"add", "delete", "check"}[rand.IntN(3)], key: "/n", value: "1"}
		}
		ctx, cancel := context.WithCancel(t.Context())
		if rand.IntN(10) == 0 {
			time.AfterFunc(time.Duration(rand.IntN(300))*time.Microsecond, cancel)
		}
		op := porcupine.Operation{ClientId: client, Input: q, Call: monotonic()}
		answer, err := c.ask(ctx, q)
		cancel()
		if op.Output, op.Return = answer, monotonic(); err != nil {
			c, op.Output, op.Return = nil, lost, math.MaxInt64
		}
		ops = append(ops, op)
	}
	return ops
}

func (c *Client) ask(ctx context.Context, q question) (answer string, err error) {
	var yes bool
	switch q.op {
	case "set":
		return "", c.Set(ctx, q.key, []byte(q.value))
	case "append":
		return "", c.Append(ctx, q.key, []byte(q.value))
	case "add":
		n, err := c.Add(ctx, q.key, 1)
		return strconv.FormatInt(n, 10), err
	case "compare_set":
		v, err := c.CompareSet(ctx, q.key, []byte(q.expected), []byte(q.value))
		return string(v), err
	case "delete":
		yes, err = c.Delete(ctx, q.key)
	case "check":
		yes, err = c.Check(ctx, q.key)
	}
	return strconv.FormatBool(yes), err
}

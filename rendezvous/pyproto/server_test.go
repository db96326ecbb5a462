package pyproto

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/pickle"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// backend answers what it was made for, and remembers what it was told.
type backend struct {
	mu     sync.Mutex
	heard  []heard
	answer func(ctx context.Context, from Caller, m *Message) ([]byte, error)
	// message is in place of answer: what is encoded by the server.
	message func(m *Message) *Message
	// uid refuses callers with another one; "" refuses none.
	uid  string
	uids []string // that were named
}

func (b *backend) Admit(_ context.Context, uid string) (known bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.uids = append(b.uids, uid)
	if b.uid != "" && uid != b.uid {
		return false, ErrJobUID
	}
	return uid != "", nil
}

type heard struct {
	method string
	from   Caller
	m      *Message
}

func (b *backend) hear(method string, from Caller, m *Message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.heard = append(b.heard, heard{method, from, m})
}

func (b *backend) Get(ctx context.Context, from Caller, m *Message) (Answer, error) {
	if b.message != nil {
		return Answer{Message: b.message(m)}, nil
	}
	b.hear("get", from, m)
	data, err := b.answer(ctx, from, m)
	return Answer{Encoded: data}, err
}

func (b *backend) Report(ctx context.Context, from Caller, m *Message) (bool, error) {
	b.hear("report", from, m)
	data, err := b.answer(ctx, from, m)
	return data != nil, err
}

// echo answers with the message itself, in the dialect of the request.
func echo(_ context.Context, _ Caller, m *Message) ([]byte, error) { return pickle.Encode(m), nil }

func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &http.Server{Handler: h, Protocols: new(http.Protocols), ErrorLog: log.New(io.Discard, "", 0)}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() {
		_ = s.Close()
		<-served
	})
	return l.Addr().String()
}

func client(t *testing.T, cfg ClientConfig) *Client {
	t.Helper()
	c := NewClient(cfg)
	t.Cleanup(c.Close)
	return c
}

// both runs f with both transports.
func both(t *testing.T, f func(t *testing.T, http bool)) {
	t.Run("gRPC", func(t *testing.T) { f(t, false) })
	t.Run("HTTP", func(t *testing.T) { f(t, true) })
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestCalls(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		b := &backend{answer: echo}
		addr := serve(t, Handler(b))
		for _, speak := range []Dialect{"", Comm, Grpc} {
			for _, caller := range []Caller{
				{3, "worker", "uid"}, {-1, "", ""}, {1<<31 - 1, "größe", ""}, {-1 << 31, "chief", "x"},
			} {
				b.heard, b.uids = nil, nil
				c := client(t, ClientConfig{Addr: addr, HTTP: http, Caller: caller, Speak: speak})
				m := c.New("KeyValuePair", Field{"key", "k"}, Field{"value", []byte("v\x00")})
				got, err := c.Get(soon(t), m)
				require.NoError(t, err)
				require.Equal(t, m, got)
				require.NoError(t, c.Report(soon(t), m))
				require.Equal(t, []string{caller.JobUID, caller.JobUID}, b.uids)
				caller.JobUID = ""
				require.Equal(t, []heard{{"get", caller, m}, {"report", caller, m}}, b.heard)
				require.NotEmpty(t, c.Dialect())
			}
		}
	})
}

// What a request says of its sender is kept, so it is short; it is checked before the message is read.
func TestSendersThatCannotBe(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		b := &backend{answer: echo}
		addr := serve(t, Handler(b))
		for _, c := range []struct {
			caller Caller
			want   string // "": it is served
		}{
			{Caller{NodeType: strings.Repeat("x", maxKind)}, ""},
			{Caller{NodeType: strings.Repeat("x", maxKind+1)}, "of 65 bytes"},
			{Caller{NodeType: strings.Repeat("x", 10<<20)}, "at most 64"},
			{Caller{NodeType: strings.Repeat("ö", maxKind/2+1)}, "of 66 bytes"},
			{Caller{NodeID: 1 << 31}, "a number of 32 bits"},
		} {
			if c.caller.NodeID != 0 && !http {
				continue // it cannot be said by gRPC
			}
			b.heard = nil
			cl := client(t, ClientConfig{Addr: addr, HTTP: http, Caller: c.caller})
			_, err := cl.Get(soon(t), cl.New("HeartBeat"))
			for _, err := range []error{err, cl.Report(soon(t), cl.New("HeartBeat"))} {
				if c.want == "" {
					require.NoError(t, err)
					continue
				}
				require.ErrorContains(t, err, map[bool]string{true: "400", false: c.want}[http])
				require.Empty(t, b.heard)
			}
		}
	})
}

func TestNoAnswerAndNoSuccess(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		b := &backend{answer: func(context.Context, Caller, *Message) ([]byte, error) { return nil, nil }}
		c := client(t, ClientConfig{Addr: serve(t, Handler(b)), HTTP: http})
		got, err := c.Get(soon(t), c.New("Unknown"))
		require.NoError(t, err)
		require.Nil(t, got)
		err = c.Report(soon(t), c.New("Unknown"))
		require.ErrorIs(t, err, errRefused)
		require.ErrorContains(t, err, "Unknown: it gives no reason")
	})
}

func TestAnotherJob(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		b := &backend{answer: echo, uid: "mine"}
		addr := serve(t, Handler(b))
		for _, uid := range []string{"other", ""} {
			c := client(t, ClientConfig{Addr: addr, HTTP: http, Caller: Caller{JobUID: uid}})
			_, err := c.Get(soon(t), c.New("HeartBeat"))
			require.ErrorIs(t, err, ErrJobUID)
			require.ErrorIs(t, c.Report(soon(t), c.New("HeartBeat")), ErrJobUID)
		}
		require.Empty(t, b.heard)
		c := client(t, ClientConfig{Addr: addr, HTTP: http, Caller: Caller{JobUID: "mine"}})
		require.NoError(t, c.Report(soon(t), c.New("HeartBeat")))
	})
}

func TestErrorsOfTheBackend(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		long := strings.Repeat("ä long reason\n", 5000)
		b := &backend{answer: func(context.Context, Caller, *Message) ([]byte, error) { return nil, errors.New(long) }}
		c := client(t, ClientConfig{Addr: serve(t, Handler(b)), HTTP: http})
		_, err := c.Get(soon(t), c.New("HeartBeat"))
		require.ErrorIs(t, err, errRefused)
		require.ErrorContains(t, err, "ä long reason")
		require.Less(t, len(err.Error()), 1000)
		err = c.Report(soon(t), c.New("HeartBeat"))
		require.ErrorIs(t, err, errRefused)
	})
}

// A panic of a Backend costs its call, no other.
func TestPanicOfTheBackend(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		b := &backend{answer: func(_ context.Context, _ Caller, m *Message) ([]byte, error) {
			if m.Class.Name == "Bad" {
				panic("bad")
			}
			return pickle.Encode(m), nil
		}}
		c := client(t, ClientConfig{Addr: serve(t, Handler(b)), HTTP: http})
		_, err := c.Get(soon(t), c.New("Bad"))
		require.Error(t, err)
		_, err = c.Get(soon(t), c.New("Good"))
		require.NoError(t, err)
	})
}

func TestManyCallsAtOnce(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		const calls = 1000
		arrived, all := atomic.Int64{}, make(chan struct{})
		b := &backend{answer: func(ctx context.Context, _ Caller, m *Message) ([]byte, error) {
			if arrived.Add(1) == calls {
				close(all)
			}
			select { // every one of them is under way at once
			case <-all:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			return pickle.Encode(m), nil
		}}
		addr, ctx := serve(t, Handler(b)), soon(t)
		clients := make([]*Client, 10)
		for i := range clients {
			clients[i] = client(t, ClientConfig{Addr: addr, HTTP: http})
		}
		var wg sync.WaitGroup
		failed := make(chan error, calls)
		for i := range calls {
			wg.Go(func() {
				c := clients[i%len(clients)]
				got, err := c.Get(ctx, c.New("GlobalStep", Field{"step", i}))
				if err == nil && got.Int("step") != i {
					err = fmt.Errorf("call %d got the answer %d", i, got.Int("step"))
				}
				failed <- err
			})
		}
		wg.Wait()
		for range calls {
			require.NoError(t, <-failed)
		}
	})
}

func TestBigMessages(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		b := &backend{answer: echo}
		c := client(t, ClientConfig{Addr: serve(t, Handler(b)), HTTP: http})
		value := bytes.Repeat([]byte("01234567"), 1<<20)
		for range 2 {
			got, err := c.Get(soon(t), c.New("KeyValuePair", Field{"value", value}))
			require.NoError(t, err)
			require.True(t, bytes.Equal(value, got.Get("value").([]byte)))
		}
		_, err := c.Get(soon(t), c.New("KeyValuePair", Field{"value", make([]byte, maxMessage)}))
		require.Error(t, err)
		_, err = c.Get(soon(t), c.New("KeyValuePair"))
		require.NoError(t, err, "after one that is too long")
	})
}

// tooLong answers with more than any master does.
type tooLong struct{}

func (tooLong) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	_, _ = w.Write(make([]byte, 2*maxMessage))
}

func TestAnswersThatAreTooLong(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		c := client(t, ClientConfig{Addr: serve(t, tooLong{}), HTTP: http})
		_, err := c.Get(soon(t), c.New("HeartBeat"))
		require.ErrorContains(t, err, "more than")
		require.NotErrorIs(t, err, ErrNoMaster)
	})
}

func TestConnectionsAreUsedAgain(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		var dialed atomic.Int64
		addr := serve(t, Handler(&backend{answer: echo}))
		c := client(t, ClientConfig{Addr: addr, HTTP: http, Dialed: func(a net.Addr) {
			require.Equal(t, addr, a.String())
			dialed.Add(1)
		}})
		for range 50 {
			_, err := c.Get(soon(t), c.New("HeartBeat"))
			require.NoError(t, err)
			require.NoError(t, c.Report(soon(t), c.New("HeartBeat")))
		}
		require.EqualValues(t, 1, dialed.Load())
		c.Close()
		_, err := c.Get(soon(t), c.New("HeartBeat"))
		require.NoError(t, err)
		require.EqualValues(t, 2, dialed.Load())
	})
}

func TestCancelledCalls(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		under, ended := make(chan struct{}), make(chan struct{})
		b := &backend{answer: func(ctx context.Context, _ Caller, m *Message) ([]byte, error) {
			if m.Class.Name == "Good" {
				return pickle.Encode(m), nil
			}
			close(under)
			<-ctx.Done() // the server hears of it
			close(ended)
			return nil, ctx.Err()
		}}
		c := client(t, ClientConfig{Addr: serve(t, Handler(b)), HTTP: http})
		ctx, cancel := context.WithCancel(soon(t))
		go func() {
			<-under
			cancel()
		}()
		_, err := c.Get(ctx, c.New("HeartBeat"))
		require.ErrorIs(t, err, context.Canceled)
		<-ended
		_, err = c.Get(soon(t), c.New("Good"))
		require.NoError(t, err)
	})
}

// raw serves every connection with f.
func raw(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer nc.Close()
				f(nc)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}

func TestServersThatAreNoMaster(t *testing.T) {
	say := func(text string) string {
		return raw(t, func(nc net.Conn) {
			_, _ = io.WriteString(nc, text)
			_, _ = io.Copy(io.Discard, nc)
		})
	}
	settings := string([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0})
	for _, c := range []struct {
		name, addr string
		http, grpc bool // the transports to which it is no master, as far as can be known
	}{
		{"404 for all", serve(t, http.NotFoundHandler()), true, true},
		{"a redirect", serve(t, http.RedirectHandler("http://127.0.0.1:1/", 302)), true, true},
		{"a page", serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "hello")
		})), true, true},
		{"a pickle of no answer", serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(pickle.Encode(Comm.New("HeartBeat")))
		})), true, true},
		{"HTTP/1.1 only", say("HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"), false, true},
		{"HTTP/2 only", say(settings), true, false},
		{"SSH", say("SSH-2.0-OpenSSH_9.2\r\n"), true, true},
		{"garbage", say(strings.Repeat("garbage", 1000)), true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, http := range []bool{false, true} {
				if http && !c.http || !http && !c.grpc {
					continue
				}
				cl := client(t, ClientConfig{Addr: c.addr, HTTP: http})
				_, err := cl.Get(soon(t), cl.New("HeartBeat"))
				require.ErrorIs(t, err, ErrNoMaster, "http %v", http)
				require.ErrorIs(t, cl.Report(soon(t), cl.New("HeartBeat")), ErrNoMaster)
			}
		})
	}
}

func TestServersThatSayNothing(t *testing.T) {
	both(t, func(t *testing.T, http bool) {
		c := client(t, ClientConfig{Addr: raw(t, func(net.Conn) {}), HTTP: http})
		_, err := c.Get(soon(t), c.New("HeartBeat"))
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrNoMaster, "a master that starts does so")

		arrived := make(chan struct{}, 10)
		addr := raw(t, func(nc net.Conn) {
			arrived <- struct{}{}
			_, _ = io.Copy(io.Discard, nc)
		})
		c = client(t, ClientConfig{Addr: addr, HTTP: http})
		ctx, cancel := context.WithCancel(soon(t))
		go func() {
			<-arrived
			cancel()
		}()
		_, err = c.Get(ctx, c.New("HeartBeat"))
		require.ErrorIs(t, err, context.Canceled)

		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		require.NoError(t, l.Close())
		c = client(t, ClientConfig{Addr: l.Addr().String(), HTTP: http})
		_, err = c.Get(soon(t), c.New("HeartBeat"))
		require.ErrorContains(t, err, "refused")
		require.NotErrorIs(t, err, errRefused)
	})
}

// do sends a request of HTTP/1.1 as it is written, and returns the status; 400 as well where the server hangs up on
// what it has not read to the end, which can be sooner here than its answer.
func do(t *testing.T, addr, request string) int {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer nc.Close()
	require.NoError(t, nc.SetDeadline(time.Now().Add(30*time.Second)))
	_, err = io.WriteString(nc, request)
	require.NoError(t, err)
	resp, err := http.ReadResponse(bufio.NewReader(nc), nil)
	if errors.Is(err, syscall.ECONNRESET) {
		return http.StatusBadRequest
	}
	require.NoError(t, err)
	defer resp.Body.Close()
	return resp.StatusCode
}

func TestRequestsThatAreNone(t *testing.T) {
	b := &backend{answer: echo}
	addr := serve(t, Handler(b))
	post := func(path, body string) string {
		return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
	}
	for _, c := range []struct {
		name, request string
		status        int
	}{
		{"no HTTP", "\x00\x01\x02garbage\r\n\r\n", 400},
		{"no method", " / HTTP/1.1\r\n\r\n", 400},
		{"no host", "POST /get HTTP/1.1\r\n\r\n", 400},
		{"HTTP/9", "POST /get HTTP/9.0\r\nHost: x\r\n\r\n", 505},
		{"another path", post("/other", ""), 404},
		{"another procedure", post("/elastic.Master/other", ""), 404},
		{"GET", "GET /get HTTP/1.1\r\nHost: x\r\n\r\n", 405},
		{"gRPC over HTTP/1.1", post("/elastic.Master/get", "\x00\x00\x00\x00\x00"), 505},
		{"no body", post("/get", ""), 400},
		{"no JSON", post("/get", "garbage"), 400},
		{"an array", post("/get", "[]"), 400},
		{"no base64", post("/get", `{"node_id":1,"data":"?"}`), 400},
		{"a number that is text", post("/get", `{"node_id":"1","data":""}`), 400},
		{"no pickle", post("/get", `{"node_id":1,"data":"Z2FyYmFnZQ=="}`), 400},
		{"no data", post("/report", `{}`), 400},
		{"a pickle that is no message", post("/report", `{"data":"Ti4="}`), 400},
	} {
		t.Run(c.name, func(t *testing.T) { require.Equal(t, c.status, do(t, addr, c.request)) })
	}
	require.Empty(t, b.heard)
}

// grpcCall posts a body to a procedure, and returns gRPC's status.
func grpcCall(t *testing.T, addr, path string, body io.Reader) (int, error) {
	t.Helper()
	c := client(t, ClientConfig{Addr: addr})
	req, err := http.NewRequestWithContext(soon(t), http.MethodPost, "http://"+addr+path, body)
	require.NoError(t, err)
	resp, err := c.hc.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, statusOf(resp)
}

func TestCallsThatAreNone(t *testing.T) {
	b := &backend{answer: echo}
	addr := serve(t, Handler(b))
	good := frame(envelope{Data: pickle.Encode(Comm.New("HeartBeat"))}.marshal())
	for _, c := range []struct{ name, body, want string }{
		{"nothing", "", "EOF"},
		{"half a head", "\x00\x00", "unexpected EOF"},
		{"half a body", string(good[:len(good)-1]), "unexpected EOF"},
		{"compressed", "\x01" + string(good[1:]), "compressed"},
		{"too long", "\x00\x7f\xff\xff\xff", "compressed, or of more than"},
		{"two messages", string(good) + string(good), "more than one message"},
		{"one and garbage", string(good) + "x", "more than one message"},
		{"no protobuf", "\x00\x00\x00\x00\x01\xff", "a field without a number"},
		{"no message", "\x00\x00\x00\x00\x00", "ends too early"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, name := range []string{"get", "report"} {
				_, err := grpcCall(t, addr, GRPCPath+name, strings.NewReader(c.body))
				require.ErrorIs(t, err, errRefused)
				require.ErrorContains(t, err, "gRPC status 3")
				require.ErrorContains(t, err, c.want)
			}
		})
	}
	require.Empty(t, b.heard)
	for _, path := range []string{GRPCPath + "other", "/", "/elastic.Other/get"} {
		status, err := grpcCall(t, addr, path, bytes.NewReader(good))
		require.Equal(t, http.StatusNotFound, status) // which is UNIMPLEMENTED to gRPC
		require.ErrorIs(t, err, ErrNoMaster)
	}
	_, err := grpcCall(t, addr, GRPCPath+"get", bytes.NewReader(good))
	require.NoError(t, err)
}

func TestReadFrame(t *testing.T) {
	for _, size := range []int{0, 1, 65535, 65536, 65537, 1 << 20, maxMessage} {
		body := bytes.Repeat([]byte{7}, size)
		got, err := readFrame(bytes.NewReader(frame(body)))
		require.NoError(t, err)
		require.True(t, bytes.Equal(body, got))
	}
	most := binary.BigEndian.AppendUint32([]byte{0}, maxMessage)
	require.Less(t, heap(func() {
		_, err := readFrame(bytes.NewReader(most))
		require.ErrorIs(t, err, errProto)
	}), uint64(256<<10))
	_, err := readFrame(io.MultiReader(bytes.NewReader(frame(nil)), brokenReader{}))
	require.ErrorIs(t, err, errProto)
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errors.New("broken") }

func FuzzJSON(f *testing.F) {
	for _, seed := range []string{
		`{"node_id": 1, "node_type": "worker", "data": "Ti4="}`, `{"node_id":-1}`, `{"data":null}`, `[]`, `{"data":"?"}`,
		`{"node_id":1e3}`, `{"node_id":99999999999999999999}`, ``, `null`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		e, err := parseJSON(bytes.NewReader(in))
		if err != nil {
			require.ErrorIs(t, err, errProto)
			return
		}
		require.LessOrEqual(t, len(e.Data), len(in))
		_, err = ReadMessage(e.Data)
		if err != nil {
			require.ErrorIs(t, err, errPickle)
		}
	})
}

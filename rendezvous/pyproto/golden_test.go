package pyproto

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/pickle"
)

// sample is a message that DLRover's own package has written; see testdata/golden.py.
type sample struct {
	version string
	Class   string
	Content any
	Pickles map[string]string
}

func samples(t testing.TB) (all []sample) {
	t.Helper()
	files, err := filepath.Glob("testdata/golden/*.json")
	require.NoError(t, err)
	require.Len(t, files, 4)
	for _, file := range files {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		var some []sample
		require.NoError(t, json.Unmarshal(data, &some))
		require.NotEmpty(t, some)
		for _, s := range some {
			s.version = strings.TrimSuffix(filepath.Base(file), ".json")
			all = append(all, s)
		}
	}
	return all
}

func (s sample) pickles(t testing.TB) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	for protocol, text := range s.Pickles {
		data, err := hex.DecodeString(text)
		require.NoError(t, err)
		out[protocol] = data
	}
	return out
}

// plain is what golden.py makes of a value.
func plain(v any) any {
	type object = map[string]any
	switch v := v.(type) {
	case int64:
		return object{"int": strconv.FormatInt(v, 10)}
	case float64:
		return object{"float": pythonHex(v)}
	case []byte:
		return object{"bytes": hex.EncodeToString(v)}
	case tuple:
		return object{"tuple": plainAll(v)}
	case *List:
		return object{"list": plainAll(v.Items)}
	case *Dict:
		return plainDict(v)
	case *Message:
		return object{"object": []any{v.Class.Module, v.Class.Name, plainDict(&v.State)}}
	}
	return v
}

func plainAll(items []any) []any {
	out := []any{}
	for _, v := range items {
		out = append(out, plain(v))
	}
	return out
}

func plainDict(d *Dict) any {
	pairs := []any{}
	for _, p := range d.Pairs {
		pairs = append(pairs, []any{plain(p.Key), plain(p.Value)})
	}
	return map[string]any{"dict": pairs}
}

// pythonHex is float.hex of Python.
func pythonHex(f float64) string {
	if f == 0 {
		return "0x0.0p+0"
	}
	fraction, exponent := math.Frexp(math.Abs(f))
	sign := ""
	if f < 0 {
		sign = "-"
	}
	mantissa := uint64((fraction*2 - 1) * (1 << 52))
	return fmt.Sprintf("%s0x1.%013xp%+d", sign, mantissa, exponent-1)
}

func TestDecodeReadsWhatDLRoverWrites(t *testing.T) {
	classes := map[string]bool{}
	for _, s := range samples(t) {
		for protocol, data := range s.pickles(t) {
			m, err := ReadMessage(data)
			require.NoError(t, err, "%s %s, protocol %s", s.version, s.Class, protocol)
			require.Equal(t, s.Class, m.Class.Name)
			require.Equal(t, s.Content, plain(m), "%s %s, protocol %s", s.version, s.Class, protocol)
			classes[s.version+s.Class] = true
		}
	}
	for _, name := range []string{
		"JoinRendezvousRequest", "WaitingNodeNumRequest", "CommWorldRequest", "NetworkReadyRequest",
		"StragglerExistRequest", "KeyValuePair", "HeartBeat", "RunningNodesRequest", "SyncTrainingPort",
		"ParallelConfigRequest", "CheckHardwareResetRequest", "TaskRequest", "ShardCheckpointRequest",
		"ClusterVersionRequest", "PsNodesRequest", "TrainingStatusRequest", "RendezvousParams", "NodeEvent",
		"NodeFailure", "NodeCheckpointState", "ResourceStats", "GlobalStep", "DiagnosisReportData", "Event",
		"DiagnosisAction", "SyncJoin", "SyncFinish", "SyncBarrier", "ParallelConfig", "ModelInfo",
		"DatasetShardParams", "TaskResult", "ShardCheckpoint", "ClusterVersion", "NodeMeta", "PsReady",
		"ElasticRunConfigRequest", "ElasticRunConfig", "RendezvousState", "NetworkCheckResult", "HeartbeatResponse",
		"RunningNodes",
	} {
		for _, version := range []string{"0.4.0", "0.5.1", "0.6.1"} {
			require.True(t, classes[version+name], "%s %s", version, name)
		}
	}
	for _, name := range []string{"PreCheckRequest", "PreCheckResponse", "KeyValuePairs", "AtorchEvent", "BaseResponse"} {
		require.True(t, classes["0.5.1"+name] && classes["0.6.1"+name], name)
	}
	require.True(t, classes["0.3.8NetworkStatus"])
}

func TestEncodeAndDecodeAgree(t *testing.T) {
	for _, s := range samples(t) {
		for _, data := range s.pickles(t) {
			m, err := ReadMessage(data)
			require.NoError(t, err)
			again, err := ReadMessage(pickle.Encode(m))
			require.NoError(t, err)
			require.Equal(t, s.Content, plain(again))
		}
	}
}

// The smallest form that the restricted unpickler of 0.5 and later accepts.
func TestEncodeIsAsWritten(t *testing.T) {
	m := Comm.New("RendezvousState",
		Field{"world", &Dict{Pairs: []Pair{pair(1, 8), pair(0, 8)}}}, Field{"waiting_num", 0}, Field{"round", 1},
		Field{"group", 0})
	require.Equal(t, "\x80\x03cdlrover.python.common.comm\nRendezvousState\n)\x81}("+
		"X\x05\x00\x00\x00world}(J\x01\x00\x00\x00J\x08\x00\x00\x00J\x00\x00\x00\x00J\x08\x00\x00\x00u"+
		"X\x0b\x00\x00\x00waiting_numJ\x00\x00\x00\x00X\x05\x00\x00\x00roundJ\x01\x00\x00\x00"+
		"X\x05\x00\x00\x00groupJ\x00\x00\x00\x00ub.", string(pickle.Encode(m)))
	require.Equal(t, "\x80\x03cdlrover.python.common.grpc\nNetworkReadyRequest\n)\x81.",
		string(pickle.Encode(Grpc.New("NetworkReadyRequest"))))
}

// packages is the folder with dlrover-VERSION/bin/python, environments with DLRover's own packages.
func packages(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("DLROVER_PACKAGES")
	if dir == "" {
		t.Skipf("SKIPPED: %s IS NOT TESTED WITH DLROVER ITSELF: DLROVER_PACKAGES names no folder with "+
			"dlrover-{0.4.0,0.5.1,0.6.1}/bin/python", t.Name())
	}
	return dir
}

// python starts the Python of a version, in a folder of its own, for at most two minutes.
func python(t *testing.T, version string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, filepath.Join(packages(t), "dlrover-"+version, "bin", "python"), args...)
	cmd.Dir, cmd.WaitDelay = t.TempDir(), 5*time.Second
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1")
	return cmd
}

func golden(t *testing.T, version, mode string, in []byte) []string {
	t.Helper()
	script, err := filepath.Abs("testdata/golden.py")
	require.NoError(t, err)
	cmd := python(t, version, script, mode)
	cmd.Stdin = bytes.NewReader(in)
	var problems strings.Builder
	cmd.Stderr = &problems
	out, err := cmd.Output()
	require.NoError(t, err, problems.String())
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
}

func TestDLRoverReadsWhatEncodeWrites(t *testing.T) {
	packages(t)
	for _, version := range []string{"0.6.1", "0.5.1", "0.4.0"} {
		t.Run(version, func(t *testing.T) {
			var in bytes.Buffer
			var want []any
			for _, s := range samples(t) {
				if s.version != version {
					continue
				}
				m, err := ReadMessage(s.pickles(t)["4"])
				require.NoError(t, err)
				fmt.Fprintf(&in, "%x\n", pickle.Encode(m))
				want = append(want, s.Content)
			}
			bad := Comm.New("KeyValuePair", Field{"key", "cut \xe4\xbd"}, Field{"value", int64(math.MaxInt64)})
			if version == "0.4.0" {
				bad.Class.Module = string(Grpc)
			}
			fmt.Fprintf(&in, "%x\n", pickle.Encode(bad))
			mended, err := decode(pickle.Encode(bad))
			require.NoError(t, err)
			require.Equal(t, "cut �", mended.(*Message).Str("key"))
			want = append(want, plain(mended))
			got := golden(t, version, "read", in.Bytes())
			require.Len(t, got, len(want))
			for i, line := range got {
				var content any
				require.NoError(t, json.Unmarshal([]byte(line), &content))
				require.Equal(t, want[i], content)
			}
		})
	}
}

func TestDecodeReadsWhatIsTooLongForAFile(t *testing.T) {
	packages(t)
	for _, version := range []string{"0.6.1", "0.4.0"} {
		lines := golden(t, version, "big", nil)
		require.Len(t, lines, 12)
		for i, line := range lines {
			data, err := hex.DecodeString(line)
			require.NoError(t, err)
			m, err := ReadMessage(data)
			require.NoError(t, err)
			switch i / 3 {
			case 0:
				require.Len(t, m.Get("value"), 1<<20)
			case 1:
				require.Equal(t, strings.Repeat("ä", 100000), m.Str("value"))
			case 2:
				world := m.Dict("world").Pairs
				require.Len(t, world, 10000)
				require.Equal(t, pair(int64(9999), int64(8)), world[0])
			case 3:
				require.Len(t, m.List("nodes"), 3000)
				require.Equal(t, 2999, m.List("nodes")[2999].(*Message).Int("rank"))
			}
		}
		lines = golden(t, version, "refused", nil)
		require.Len(t, lines, 60)
		for i, line := range lines {
			data, err := hex.DecodeString(line)
			require.NoError(t, err)
			_, err = decode(data)
			require.ErrorIs(t, err, errPickle, "value %d, protocol %d", i/4, 2+i%4)
		}
	}
}

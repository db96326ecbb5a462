package lighthouse

import (
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/rendezvous"
)

// member is a QuorumMember with the replica_id "a:1", step 7, world_size 2, shrink_only, commit_failures 1, and a field
// 9, which torchft.proto did not have once.
const member = "0a03613a31" + "2007" + "2802" + "3001" + "4001" + "4a0378797a"

func bytesOf(t testing.TB, text string) []byte {
	b, err := hex.DecodeString(text)
	require.NoError(t, err)
	return b
}

func TestAskOfAReplica(t *testing.T) {
	in := bytesOf(t, "0a12"+member)
	a, err := parseAsk(in)
	require.NoError(t, err)
	require.Equal(t, rendezvous.QuorumAsk{Replica: "a:1", Member: bytesOf(t, member), ShrinkOnly: true, Failed: true}, a)
	id, err := parseHeartbeat(bytesOf(t, "0a03613a31"))
	require.NoError(t, err)
	require.Equal(t, "a:1", id)
	for i := 1; i < len(in); i++ {
		_, err := parseAsk(in[:i])
		require.ErrorIs(t, err, errMessage, i)
	}
	_, err = parseHeartbeat(bytesOf(t, "0f"))
	require.ErrorIs(t, err, errMessage, "an unknown wire type")
}

func TestQuorumInProtobuf(t *testing.T) {
	got := marshal(&rendezvous.Quorum{ID: 300, Members: [][]byte{bytesOf(t, member), {}}, Made: 2005})
	require.Equal(t, "0a22"+"08ac02"+"1212"+member+"1200"+"1a07"+"0802"+"10c096b102", hex.EncodeToString(got))
}

func FuzzParseAsk(f *testing.F) {
	f.Add(bytesOf(f, "0a12"+member))
	f.Fuzz(func(t *testing.T, in []byte) {
		a, err := parseAsk(in)
		if err == nil {
			require.LessOrEqual(t, len(a.Member), len(in))
		}
		_, _ = parseHeartbeat(in)
	})
}

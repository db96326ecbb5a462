package httperr

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	errWide   = errors.New("refused")
	errNarrow = fmt.Errorf("%w: gone", errWide)
)

var table = Table{
	{errNarrow, http.StatusNotFound, "gone"}, // which is errWide, too
	{errWide, http.StatusConflict, "refused"},
	{errors.ErrUnsupported, http.StatusConflict, "refused"},
}

func TestErrorsArriveAsThemselves(t *testing.T) {
	for _, c := range []struct {
		err    error
		status int
		code   string
		is     error
	}{
		{fmt.Errorf("node %q: %w", "a", errNarrow), http.StatusNotFound, "gone", errNarrow},
		{fmt.Errorf("node %q: %w", "a", errWide), http.StatusConflict, "refused", errWide},
		{errors.ErrUnsupported, http.StatusConflict, "refused", errWide},
		{errors.New("disk on fire"), http.StatusInternalServerError, "internal", nil},
	} {
		t.Run(c.err.Error(), func(t *testing.T) {
			rec := httptest.NewRecorder()
			table.Write(rec, c.err)
			require.Equal(t, c.status, rec.Code)
			require.Equal(t, "application/json", rec.Header().Get("Content-Type"))
			body, ok := Parse(rec.Body.Bytes())
			require.True(t, ok)
			require.Equal(t, Body{Code: c.code, Error: c.err.Error()}, body)
			got := table.Received(body)
			require.EqualError(t, got, c.err.Error())
			require.Equal(t, c.is, errors.Unwrap(got))
		})
	}
}

func TestRepliesOfOtherServices(t *testing.T) {
	for _, data := range []string{"", "<html>", "{}", `{"error":"no"}`, `{"code":7,"error":"no"}`, `[]`, `{"code":"x"`} {
		_, ok := Parse([]byte(data))
		require.False(t, ok, data)
	}
	body, ok := Parse([]byte(`{"code":"of a later version","error":"no","hint":"x"}`))
	require.True(t, ok)
	require.EqualError(t, table.Received(body), "no")
}
